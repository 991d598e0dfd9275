#!/bin/sh
# Fetch the mean image and the class names of ILSVRC-2012 into this folder, for nets whose definition names the mean image.
set -eu
url=${URL:-http://dl.caffe.berkeleyvision.org/caffe_ilsvrc12.tar.gz}
here=$(cd "$(dirname "$0")" && pwd)
stage=$(mktemp -d "$here/.aux.XXXXXX.partial")
trap 'rm -rf "$stage"' EXIT
if ! python3 -c 'import shutil, sys, urllib.request as r
shutil.copyfileobj(r.urlopen(sys.argv[1], timeout=30), open(sys.argv[2], "wb"))' "$url" "$stage/aux.tar.gz" 2>/dev/null
then
    echo "get_ilsvrc_aux.sh: $url cannot be fetched; mean_value: 104, 117 and 123 in place of mean_file is nearly the same" >&2
    exit 1
fi
tar -C "$stage" -xzf "$stage/aux.tar.gz" imagenet_mean.binaryproto synset_words.txt
mv "$stage/imagenet_mean.binaryproto" "$stage/synset_words.txt" "$here"
echo "$here: imagenet_mean.binaryproto, synset_words.txt"

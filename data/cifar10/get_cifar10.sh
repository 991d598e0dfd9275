#!/bin/sh
# The name that Caffe's users know for examples/cifar10/get_cifar10.sh.
exec "$(dirname "$0")/../../examples/cifar10/get_cifar10.sh" "$@"

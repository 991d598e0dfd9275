"""Lossy codecs: a chunk's gradient or change of value as fewer bytes, and back.

Pure: numbers in, numbers out.

    codec      bytes of n elements                      sent
    int8       n + 4 n / 256                            round(x / scale), scale = largest magnitude of the block / 127
    int4       n / 2 + 4 n / 64                         the same with 7 levels on each side of 0, in smaller blocks
    sign       n / 8 + 4 n / 256                        the sign of x, and the mean magnitude of the block
    topk:f     6 f n                                    the largest magnitudes of each segment, with their positions
    randomk:f  4 f n                                    elements of each segment, one from each of equal parts

A block is 256 elements (64 of int4), a segment 16,384 (the last of a table may be shorter). Chunks
of such tables are cut between segments (`placement.py`), so that bits do not depend on the chunks.

A codec is one class: `base.py` has the contract, `registry.py` the names. If `ps_server/native`
has a codec of that name, it computes in its place.

Sources: block scales as in 8-bit optimizers (Dettmers et al., ICLR 2022); sign with a mean:
Karimireddy et al., ICML 2019; top-k: Aji and Heafield, EMNLP 2017; feedback in both directions:
Tang et al. (DoubleSqueeze), ICML 2019.
"""

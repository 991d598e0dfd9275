"""The names that files of predictors use for nets and blobs."""

from __future__ import annotations

from poseidon.caffe2.proto import predictor_consts_pb2

predictor_constants = predictor_consts_pb2.PredictorConsts()

from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class TwoNumberStatsProto(_message.Message):
    __slots__ = ("mean", "stddev", "count")
    MEAN_FIELD_NUMBER: _ClassVar[int]
    STDDEV_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    mean: float
    stddev: float
    count: int
    def __init__(self, mean: _Optional[float] = ..., stddev: _Optional[float] = ..., count: _Optional[int] = ...) -> None: ...

class BlobProfile(_message.Message):
    __slots__ = ("name", "bytes_used")
    NAME_FIELD_NUMBER: _ClassVar[int]
    BYTES_USED_FIELD_NUMBER: _ClassVar[int]
    name: str
    bytes_used: TwoNumberStatsProto
    def __init__(self, name: _Optional[str] = ..., bytes_used: _Optional[_Union[TwoNumberStatsProto, _Mapping]] = ...) -> None: ...

class ProfDAGProto(_message.Message):
    __slots__ = ("name", "mean", "stddev", "execution_time", "output_profile", "extra_info")
    NAME_FIELD_NUMBER: _ClassVar[int]
    MEAN_FIELD_NUMBER: _ClassVar[int]
    STDDEV_FIELD_NUMBER: _ClassVar[int]
    EXECUTION_TIME_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_PROFILE_FIELD_NUMBER: _ClassVar[int]
    EXTRA_INFO_FIELD_NUMBER: _ClassVar[int]
    name: str
    mean: float
    stddev: float
    execution_time: TwoNumberStatsProto
    output_profile: _containers.RepeatedCompositeFieldContainer[BlobProfile]
    extra_info: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, name: _Optional[str] = ..., mean: _Optional[float] = ..., stddev: _Optional[float] = ..., execution_time: _Optional[_Union[TwoNumberStatsProto, _Mapping]] = ..., output_profile: _Optional[_Iterable[_Union[BlobProfile, _Mapping]]] = ..., extra_info: _Optional[_Iterable[str]] = ...) -> None: ...

class ProfDAGProtos(_message.Message):
    __slots__ = ("stats", "net_name", "ops_stats")
    STATS_FIELD_NUMBER: _ClassVar[int]
    NET_NAME_FIELD_NUMBER: _ClassVar[int]
    OPS_STATS_FIELD_NUMBER: _ClassVar[int]
    stats: _containers.RepeatedCompositeFieldContainer[ProfDAGProto]
    net_name: str
    ops_stats: _containers.RepeatedCompositeFieldContainer[OpProfile]
    def __init__(self, stats: _Optional[_Iterable[_Union[ProfDAGProto, _Mapping]]] = ..., net_name: _Optional[str] = ..., ops_stats: _Optional[_Iterable[_Union[OpProfile, _Mapping]]] = ...) -> None: ...

class OpProfile(_message.Message):
    __slots__ = ("idx", "net_name", "type", "exec_time_secs")
    IDX_FIELD_NUMBER: _ClassVar[int]
    NET_NAME_FIELD_NUMBER: _ClassVar[int]
    TYPE_FIELD_NUMBER: _ClassVar[int]
    EXEC_TIME_SECS_FIELD_NUMBER: _ClassVar[int]
    idx: str
    net_name: str
    type: str
    exec_time_secs: float
    def __init__(self, idx: _Optional[str] = ..., net_name: _Optional[str] = ..., type: _Optional[str] = ..., exec_time_secs: _Optional[float] = ...) -> None: ...

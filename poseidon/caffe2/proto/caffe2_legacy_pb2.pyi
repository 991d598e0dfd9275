from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from typing import ClassVar as _ClassVar

DESCRIPTOR: _descriptor.FileDescriptor

class LegacyPadding(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    NOTSET: _ClassVar[LegacyPadding]
    VALID: _ClassVar[LegacyPadding]
    SAME: _ClassVar[LegacyPadding]
    CAFFE_LEGACY_POOLING: _ClassVar[LegacyPadding]
NOTSET: LegacyPadding
VALID: LegacyPadding
SAME: LegacyPadding
CAFFE_LEGACY_POOLING: LegacyPadding

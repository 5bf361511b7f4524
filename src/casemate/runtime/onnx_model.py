"""Writes ONNX models by their few protobuf messages, without the onnx package (35 MB with its dependencies).

Field numbers are those of onnx.proto (https://github.com/onnx/onnx/blob/main/onnx/onnx.proto), which never change.
``tests/unit/test_onnx_model.py`` reads the models with the onnx package and checks them.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

FLOAT, INT64 = 1, 7  # element types (TensorProto.DataType)
_FLOAT_ATTRIBUTE, _INT_ATTRIBUTE, _INTS_ATTRIBUTE = 1, 2, 7
Attribute: TypeAlias = int | float | Sequence[int]


def node(operator: str, inputs: Iterable[str], outputs: Iterable[str], **attributes: Attribute) -> bytes:
    """NodeProto: one operation."""
    parts = [*(_text(1, name) for name in inputs), *(_text(2, name) for name in outputs), _text(4, operator)]
    return b"".join([*parts, *(_field(5, _attribute(name, value)) for name, value in attributes.items())])


def tensor(name: str, value: npt.NDArray[Any]) -> bytes:
    """TensorProto: a constant, float32 or int64."""
    kind = {np.dtype(np.float32): FLOAT, np.dtype(np.int64): INT64}[value.dtype]
    dims = b"".join(_integer(1, size) for size in value.shape)
    data = np.ascontiguousarray(value, value.dtype.newbyteorder("<")).tobytes()
    return dims + _integer(2, kind) + _text(8, name) + _field(9, data)


def value_info(name: str, kind: int, shape: Iterable[int | str]) -> bytes:
    """ValueInfoProto: an input or output; a dimension is a size or the name of a variable one."""
    dims = (_integer(1, size) if isinstance(size, int) else _text(2, size) for size in shape)
    tensor_type = _integer(1, kind) + _field(2, b"".join(_field(1, dim) for dim in dims))
    return _text(1, name) + _field(2, _field(1, tensor_type))


def model(
    nodes: Iterable[bytes], constants: Iterable[bytes], inputs: Iterable[bytes], outputs: Iterable[bytes], opset: int
) -> bytes:
    """ModelProto, IR version 10: a file's whole content.

    The inputs of each node must be available before it. Nodes refer to constants, tensors, by name. ``opset`` is the
    version of the default operator set.
    """
    parts = [(1, nodes), (5, constants), (11, inputs), (12, outputs)]
    graph = _text(2, "graph") + b"".join(_field(number, one) for number, many in parts for one in many)
    return _integer(1, 10) + _field(8, _text(1, "") + _integer(2, opset)) + _field(7, graph)


def _attribute(name: str, value: Attribute) -> bytes:
    if isinstance(value, int):
        return _text(1, name) + _integer(3, value) + _integer(20, _INT_ATTRIBUTE)
    if isinstance(value, float):
        return _text(1, name) + _key(2, 5) + struct.pack("<f", value) + _integer(20, _FLOAT_ATTRIBUTE)
    return _text(1, name) + b"".join(_integer(8, one) for one in value) + _integer(20, _INTS_ATTRIBUTE)


def _key(number: int, wire_type: int) -> bytes:
    return _varint(number << 3 | wire_type)


def _integer(number: int, value: int) -> bytes:
    return _key(number, 0) + _varint(value)


def _text(number: int, value: str) -> bytes:
    return _field(number, value.encode())


def _field(number: int, content: bytes) -> bytes:
    return _key(number, 2) + _varint(len(content)) + content


def _varint(value: int) -> bytes:
    """Seven bits a byte, low ones first; a negative number as 64 bits in two's complement."""
    value &= (1 << 64) - 1
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)

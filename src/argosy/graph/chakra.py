"""Write a step as a Chakra execution trace, which network simulators such as ASTRA-sim read.

The wire format of protobuf is written by hand: the three messages of Chakra's et_def.proto that matter here are a page,
and no package on PyPI holds them. One file is the program of one rank; all ranks of a recipe run the same one.
"""

import struct

from argosy.cost import Op, Recipe, Trace

VERSION = "0.0.4"
COMPUTE, COLLECTIVE = 4, 7
"""Chakra's NodeType: COMP_NODE and COMM_COLL_NODE."""
KINDS = {"all_reduce": 0, "all_gather": 2, "all_to_all": 6, "reduce_scatter": 7}
"""Chakra's CollectiveCommType."""


def varint(value: int) -> bytes:
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def field(number: int, value: int | str | bytes | float) -> bytes:
    """One field of a message: integers as varints, floats as doubles, the rest with its length."""
    if isinstance(value, float):
        return varint(number << 3 | 1) + struct.pack("<d", value)
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    data = value.encode() if isinstance(value, str) else value
    return varint(number << 3 | 2) + varint(len(data)) + data


def packed(number: int, values: tuple[int, ...]) -> bytes:
    return field(number, b"".join(varint(each) for each in values)) if values else b""


def attribute(name: str, number: int, value: int | str) -> bytes:
    """An AttributeProto; `number` is the field of its value: 7 int64, 11 uint64, 29 bool, 31 string."""
    return field(10, field(1, name) + field(number, value))


def node(index: int, op: Op, recipe: Recipe, micros: float) -> bytes:
    """A Node: id, name, type, data dependencies, duration in microseconds, attributes."""
    body = field(1, index) + field(2, f"{op.path}:{op.name}" if op.path else op.name)
    body += field(3, COLLECTIVE if op.collective else COMPUTE)
    body += packed(5, op.needs)
    body += field(7, round(micros)) if micros else b""
    body += attribute("is_cpu_op", 29, 0)
    if op.collective is None:
        return body + attribute("num_ops", 7, round(op.flops)) + attribute("tensor_size", 11, round(op.bytes))
    body += attribute("comm_type", 7, KINDS[op.collective.kind]) + attribute("comm_size", 7, round(op.collective.bytes))
    return body + attribute("pg_name", 31, op.collective.dim)


def chakra_bytes(trace: Trace, recipe: Recipe) -> bytes:
    """The whole trace: a GlobalMetadata message, then one Node message per operation, each with its length."""
    metadata = field(1, VERSION) + attribute_of_metadata("recipe", str(recipe))
    messages = [metadata, *(node(index, op, recipe, 0.0) for index, op in enumerate(trace.ops))]
    return b"".join(varint(len(each)) + each for each in messages)


def attribute_of_metadata(name: str, text: str) -> bytes:
    return field(2, field(1, name) + field(31, text))

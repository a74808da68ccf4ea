"""The bytes we write are Envoy's bytes: our declarations against those of `envoy-data-plane`.

`envoy-data-plane` is made from Envoy's own .proto files by another code generator (betterproto2), so the two
sides share neither the declarations nor the encoder. A message is described here as plain data: a dict of the
fields that are set. Each side is built from it, and must read what the other wrote as its own.
"""

from __future__ import annotations

import dataclasses
import importlib
import itertools
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import cache
from typing import Any, NamedTuple

import grpc
import pytest
from google.protobuf import duration_pb2, struct_pb2, wrappers_pb2
from google.protobuf.descriptor import Descriptor, EnumDescriptor, FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from hypothesis import given
from hypothesis import strategies as st

from extproc import wire
from extproc.wire import base_pb2, external_processor_pb2, http_status_pb2, processing_mode_pb2

FILES = [
    module.DESCRIPTOR for module in (base_pb2, external_processor_pb2, http_status_pb2, processing_mode_pb2)
]
# The package warns when it is imported (its pydantic validators) and about fields that upstream deprecates.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

TYPE_NAMES = {
    getattr(FieldDescriptor, name): name.removeprefix("TYPE_").lower()
    for name in dir(FieldDescriptor)
    if name.startswith("TYPE_")
}


# --- The declarations ---------------------------------------------------------------------------------------


def messages() -> list[Descriptor]:
    """Every message that our .proto files declare, nested ones too."""

    def below(descriptor: Descriptor) -> Iterator[Descriptor]:
        if not descriptor.GetOptions().map_entry:
            yield descriptor
        for nested in descriptor.nested_types:
            yield from below(nested)

    return [found for file in FILES for top in file.message_types_by_name.values() for found in below(top)]


def enums() -> list[EnumDescriptor]:
    nested = [enum for message in messages() for enum in message.enum_types]
    return [enum for file in FILES for enum in file.enum_types_by_name.values()] + nested


def theirs(descriptor: Descriptor | EnumDescriptor) -> Any:
    """Envoy's class of the same full name: `ProcessingMode.BodySendMode` is `ProcessingModeBodySendMode`."""
    package = descriptor.file.package
    module = importlib.import_module(f"envoy_data_plane.{package}")
    return getattr(module, descriptor.full_name.removeprefix(package).replace(".", ""))


def their_fields(cls: Any) -> dict[str, Any]:
    return {field.name: field.metadata["betterproto"] for field in dataclasses.fields(cls)}


def map_value(field: FieldDescriptor) -> FieldDescriptor | None:
    """What a map field maps to; None when the field is no map. Every map here has string keys."""
    if field.message_type is None or not field.message_type.GetOptions().map_entry:
        return None
    assert field.message_type.fields_by_name["key"].type == FieldDescriptor.TYPE_STRING
    return field.message_type.fields_by_name["value"]


def named(value: Any) -> str:
    return str(value.full_name)


@pytest.mark.parametrize("message", messages(), ids=named)
def test_a_field_is_declared_as_upstream(message: Descriptor) -> None:
    upstream = their_fields(theirs(message))
    for field in message.fields:
        assert field.name in upstream, f"{message.full_name} has no field {field.name} upstream"
        there = upstream[field.name]
        assert field.number == there.number, field.full_name
        assert there.group == (field.containing_oneof and field.containing_oneof.name), field.full_name
        if value := map_value(field):
            assert there.proto_type == "map", field.full_name
            assert [meta.proto_type for meta in there.map_meta] == ["string", TYPE_NAMES[value.type]]
        else:
            assert there.proto_type == TYPE_NAMES[field.type], field.full_name
            assert there.repeated == field.is_repeated, field.full_name


@pytest.mark.parametrize("message", messages(), ids=named)
def test_no_field_of_upstream_is_missing(message: Descriptor) -> None:
    """What we declare, we declare whole; a field that a new Envoy adds shows up here."""
    assert set(their_fields(theirs(message))) == {field.name for field in message.fields}


@pytest.mark.parametrize("enum", enums(), ids=named)
def test_an_enum_has_upstreams_values(enum: EnumDescriptor) -> None:
    assert {value.name: value.number for value in enum.values} == {
        value.name: int(value) for value in theirs(enum)
    }


def test_the_service_is_declared_as_upstream() -> None:
    service = external_processor_pb2.DESCRIPTOR.services_by_name["ExternalProcessor"]
    (method,) = service.methods
    assert method.client_streaming
    assert method.server_streaming
    assert (method.input_type, method.output_type) == (
        wire.ProcessingRequest.DESCRIPTOR,
        wire.ProcessingResponse.DESCRIPTOR,
    )
    assert f"/{service.full_name}/{method.name}" == wire.PROCESS_PATH


def test_upstreams_client_reaches_a_handler_at_our_path() -> None:
    """Envoy-data-plane's own stub, over real gRPC, against a generic handler as the server registers it."""

    def process(requests: Iterator[wire.ProcessingRequest], _: grpc.ServicerContext) -> Iterator[Message]:
        for request in requests:
            assert request.WhichOneof("request") == "request_headers"
            yield wire.ProcessingResponse(request_headers=wire.HeadersResponse())

    handler = grpc.stream_stream_rpc_method_handler(
        process,
        request_deserializer=wire.ProcessingRequest.FromString,
        response_serializer=wire.ProcessingResponse.SerializeToString,
    )
    server = grpc.server(ThreadPoolExecutor(max_workers=1))
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler(wire.SERVICE, {wire.METHOD: handler}),)
    )
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    upstream = importlib.import_module("envoy_data_plane.envoy.service.ext_proc.v3")
    try:
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            asked = [upstream.ProcessingRequest(request_headers=upstream.HttpHeaders(end_of_stream=True))]
            answers = list(upstream.ExternalProcessorSyncStub(channel).process(asked))
    finally:
        server.stop(None).wait()
    assert answers == [upstream.ProcessingResponse(request_headers=upstream.HeadersResponse())]


# --- The bytes ----------------------------------------------------------------------------------------------


class WellKnown(NamedTuple):
    """A google.protobuf type that at least one side has as a Python value rather than as a message."""

    samples: list[Any]
    random: st.SearchStrategy[Any]
    ours: Callable[[Any], Message]
    theirs: Callable[[Any], Any]


def our_duration(value: timedelta) -> Message:
    duration = duration_pb2.Duration()
    duration.FromTimedelta(value)
    return duration


def our_struct(value: dict[str, Any]) -> Message:
    struct = struct_pb2.Struct()
    struct.update(value)
    return struct


def their_struct(value: dict[str, Any]) -> Any:
    return importlib.import_module("envoy_data_plane.google.protobuf").Struct.from_dict(value)


JSON = st.recursive(
    st.none() | st.booleans() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
WELL_KNOWN = {
    "google.protobuf.BoolValue": WellKnown(
        samples=[False, True],
        random=st.booleans(),
        ours=lambda value: wrappers_pb2.BoolValue(value=value),
        theirs=lambda value: value,
    ),
    "google.protobuf.Duration": WellKnown(
        samples=[timedelta(0), timedelta(seconds=1, microseconds=500_000), timedelta(microseconds=1)],
        random=st.timedeltas(timedelta(0), timedelta(days=3650)),
        ours=our_duration,
        theirs=lambda value: value,
    ),
    "google.protobuf.Struct": WellKnown(
        samples=[{}, {"envoy.lb": {"endpoints": "10.0.0.1:8000", "n": 1.5, "list": [None, True, {"x": []}]}}],
        random=st.dictionaries(st.text(max_size=8), JSON, max_size=3),
        ours=our_struct,
        theirs=their_struct,
    ),
}
SCALARS: dict[str, tuple[list[Any], st.SearchStrategy[Any]]] = {
    "bool": ([True], st.booleans()),
    "bytes": ([b"\xff\x00 not UTF-8"], st.binary(max_size=40)),
    "string": (["x-gateway-destination-endpoint", "é\U0001f600"], st.text(max_size=20)),
    "uint32": ([1, 2**32 - 1], st.integers(0, 2**32 - 1)),
}


def ours_of(message: Descriptor, plain: Any) -> Message:
    if message.full_name in WELL_KNOWN:
        return WELL_KNOWN[message.full_name].ours(plain)
    return GetMessageClass(message)(**built(message, plain, ours_of))


def theirs_of(message: Descriptor, plain: Any) -> Any:
    if message.full_name in WELL_KNOWN:
        return WELL_KNOWN[message.full_name].theirs(plain)
    values = built(message, plain, theirs_of)
    for field in message.fields:
        if field.enum_type and field.name in values:
            values[field.name] = theirs(field.enum_type)(values[field.name])
    return theirs(message)(**values)


def built(message: Descriptor, plain: dict[str, Any], of: Callable[[Descriptor, Any], Any]) -> dict[str, Any]:
    """The fields of ``plain``, their messages made by ``of``."""
    values: dict[str, Any] = {}
    for name, value in plain.items():
        field = message.fields_by_name[name]
        if (entry := map_value(field)) and entry.message_type:
            values[name] = {key: of(entry.message_type, item) for key, item in value.items()}
        elif field.message_type and field.is_repeated:
            values[name] = [of(field.message_type, item) for item in value]
        else:
            values[name] = of(field.message_type, value) if field.message_type else value
    return values


@cache
def variants(message: Descriptor) -> list[Any]:
    """Empty; each field alone, with each of its values; all fields together, once for each oneof member."""
    if message.full_name in WELL_KNOWN:
        return WELL_KNOWN[message.full_name].samples
    by_field = {field.name: field_variants(field) for field in message.fields}
    alone = [{name: value} for name, values in by_field.items() for value in values]
    oneofs = [[field.name for field in oneof.fields] for oneof in message.oneofs]
    together = []
    for chosen in itertools.product(*oneofs):
        left_out = {name for members in oneofs for name in members} - set(chosen)
        together.append({name: values[-1] for name, values in by_field.items() if name not in left_out})
    return [{}, *alone, *together]


def field_variants(field: FieldDescriptor) -> list[Any]:
    """Values of one field that the wire can tell from the field's absence."""
    if value := map_value(field):
        return [{f"key {index}": item for index, item in enumerate(field_variants(value))}]
    if field.enum_type:
        samples = [value.number for value in field.enum_type.values if value.number]
    elif field.message_type:
        samples = variants(field.message_type)
    else:
        samples = SCALARS[TYPE_NAMES[field.type]][0]
        if field.has_presence:
            samples = [field.default_value, *samples]
    return [samples[-1:], samples] if field.is_repeated else samples


@cache
def random_messages(message: Descriptor) -> st.SearchStrategy[Any]:
    if message.full_name in WELL_KNOWN:
        return WELL_KNOWN[message.full_name].random
    optional = {field.name: random_values(field) for field in message.fields if not field.containing_oneof}
    oneofs: list[st.SearchStrategy[Any]] = [
        st.just({}) | st.one_of([st.fixed_dictionaries({f.name: random_values(f)}) for f in oneof.fields])
        for oneof in message.oneofs
    ]

    def set_fields(parts: tuple[dict[str, Any], ...]) -> dict[str, Any]:
        """The parts as one dict, without what the wire can't tell from a field's absence."""
        fields = {name: value for part in parts for name, value in part.items()}
        return {
            name: value
            for name, value in fields.items()
            if value or message.fields_by_name[name].has_presence
        }

    return st.tuples(st.fixed_dictionaries({}, optional=optional), *oneofs).map(set_fields)


def random_values(field: FieldDescriptor) -> st.SearchStrategy[Any]:
    if value := map_value(field):
        return st.dictionaries(st.text(max_size=8), random_values(value), max_size=2)
    if field.enum_type:
        single = st.sampled_from([value.number for value in field.enum_type.values])
    elif field.message_type:
        single = random_messages(field.message_type)
    else:
        single = SCALARS[TYPE_NAMES[field.type]][1]
    return st.lists(single, max_size=3) if field.is_repeated else single


def assert_both_read_it(message: Descriptor, plain: Any) -> None:
    ours, their_message = ours_of(message, plain), theirs_of(message, plain)
    assert theirs(message).parse(ours.SerializeToString()) == their_message, plain
    assert type(ours).FromString(bytes(their_message)) == ours, plain


@pytest.mark.parametrize("message", messages(), ids=named)
def test_each_side_reads_every_field_that_the_other_wrote(message: Descriptor) -> None:
    for plain in variants(message):
        assert_both_read_it(message, plain)


@given(st.data())
def test_each_side_reads_any_message_that_the_other_wrote(data: st.DataObject) -> None:
    message = data.draw(
        st.sampled_from([wire.ProcessingRequest.DESCRIPTOR, wire.ProcessingResponse.DESCRIPTOR])
    )
    assert_both_read_it(message, data.draw(random_messages(message)))


@pytest.mark.parametrize("message", messages(), ids=named)
def test_a_field_that_a_newer_envoy_adds_is_kept(message: Descriptor) -> None:
    """Numbers 500 (varint) and 501 (bytes) are nobody's: reading must not fail, nor lose what is known."""
    unknown = b"\xa0\x1f\x01" + b"\xaa\x1f\x03new"
    for plain in variants(message):
        ours = ours_of(message, plain)
        known = ours.SerializeToString()
        for data in (known + unknown, unknown + known):
            read = type(ours).FromString(data)
            assert unknown in read.SerializeToString()
            read.DiscardUnknownFields()
            assert read == ours


def test_the_numbers_that_upstream_retired_stay_unused() -> None:
    """Number 1 of ProcessingRequest was `async_mode`; an old proxy that sends it must not be misread."""
    request = wire.ProcessingRequest.FromString(b"\x08\x01")
    assert request.ListFields() == []

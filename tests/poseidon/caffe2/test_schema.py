"""Records: columns by name, blobs, nets' inputs and outputs."""

from __future__ import annotations

import pickle

import numpy as np
import pytest

from poseidon.caffe2 import core, schema, workspace
from poseidon.caffe2.schema import List, Map, NewRecord, Scalar, Struct


def record() -> Struct:
    return Struct(
        ("a", np.float32),
        ("b", Struct(("c", np.int64), ("d", List(np.float32)))),
        ("b:e", (np.int32, (2,))),
    )


def test_columns_have_full_names_and_types() -> None:
    assert record().field_names() == ["a", "b:c", "b:d:lengths", "b:d:values", "b:e"]
    assert record().field_types()[:3] == [np.float32, np.int64, np.int32]
    assert record().b.e.shape == (2,)
    assert Map(np.int64, np.float32).field_names() == ["lengths", "values:keys", "values:values"]
    assert schema.Tuple(np.int32, np.int64).field_names() == ["field_0", "field_1"]


def test_parts_by_attribute_and_by_name() -> None:
    whole = record()
    assert whole.b.c is whole["b:c"]
    assert whole["b:d:lengths"] is whole.b.d.lengths
    assert "b:c" in whole and "b:x" not in whole
    assert whole[["a", "b:c"]].field_names() == ["a", "b:c"]
    with pytest.raises(AttributeError):
        _ = whole.nothing
    with pytest.raises(ValueError, match="Duplicate field name: a"):
        Struct(("a", np.int32), ("a", np.int32))


def test_blobs_of_a_record() -> None:
    net = core.Net("records")
    assert not record().has_blobs()
    with pytest.raises(AssertionError, match="not set"):
        record().a()
    made = NewRecord(net, record())
    assert [str(blob) for blob in made.field_blobs()] == made.field_names()
    assert made.clone_schema() == record() == made
    assert not made.clone_schema().has_blobs()
    assert schema.equal_schemas(made, record())
    assert schema.is_schema_subset(made[["a"]], record())


def test_records_are_added() -> None:
    both = Struct(("a", np.int32), ("s", Struct(("x", np.int32)))) + Struct(
        ("s", Struct(("y", np.int32)))
    )
    assert both.field_names() == ["a", "s:x", "s:y"]


def test_records_are_fed_and_fetched() -> None:
    made = NewRecord(core.Net("fed"), Struct(("a", np.float32), ("b", np.int64)))
    schema.FeedRecord(made, [np.ones(2, dtype=np.float32), np.arange(3)])
    fetched = schema.FetchRecord(made)
    assert fetched.b().tolist() == [0, 1, 2]
    net = core.Net("constant")
    again = schema.ConstRecord(net, fetched)
    empty = schema.InitEmptyRecord(net, Struct(("e", (np.float32, (3,)))))
    workspace.RunNetOnce(net)
    assert workspace.FetchBlob(again.a()).tolist() == [1, 1]
    assert workspace.FetchBlob(empty.e()).shape == (0, 3)


@pytest.mark.parametrize("with_blobs", [False, True])
def test_the_inputs_of_a_net(with_blobs: bool) -> None:
    net = core.Net("inputs")
    given = Struct(("x", Scalar(np.float32)))
    found = net.set_input_record(NewRecord(net, given) if with_blobs else given)
    assert net.BlobIsDefined(found.x())
    assert found.x() in net.external_inputs
    assert str(found.x()) == ("x" if with_blobs else f"{net.Name()}/x")
    assert net.input_record() is found
    copy = net.Clone("copy", {found.x(): "other"})
    assert str(copy.input_record().x()) == "other"


def test_the_outputs_of_a_net() -> None:
    net = core.Net("outputs")
    y = net.Relu("x", "y")
    net.set_output_record(Struct(("y", Scalar(np.float32, y))))
    assert net.external_outputs == ["y"]
    with pytest.raises(AssertionError, match="cannot be reset"):
        net.set_output_record(Struct(("z", Scalar(np.float32, y))))


def test_parts_are_copies_and_do_not_change() -> None:
    part = Scalar(np.int32)
    whole = Struct(("a", part))
    part.set_type(np.int64)
    assert whole.a.dtype == np.int32
    with pytest.raises(TypeError, match="disabled"):
        whole.a = part
    assert [part.dtype for part in schema.Tuple(np.int32, str)] == [np.int32, np.dtype(str)]


@pytest.mark.parametrize("other", [Struct(("a", np.int32)), Struct(("s", np.int32))])
def test_columns_are_not_merged(other: Struct) -> None:
    with pytest.raises(TypeError, match="must be a Struct"):
        _ = Struct(("a", np.int32), ("s:x", np.int32)) + other


def test_parts_are_taken_away() -> None:
    whole = Struct(
        ("a", np.int32), ("s", Struct(("x", np.int32), ("y", np.int32))), ("b:c", np.int32)
    )
    assert (whole - Struct(("s:x", np.int32), ("b:c", np.int32))).field_names() == ["a", "s:y"]
    with pytest.raises(TypeError, match="have two types"):
        _ = whole - Struct(("s", np.int32))


def test_the_places_of_columns() -> None:
    whole = record()
    assert whole.b.slice() == slice(1, 5)
    assert whole.b.d.slice() == slice(2, 4)
    assert (whole.a.id(), whole.b.e.id()) == (0, 4)


def test_limits_are_for_integers() -> None:
    limit = schema.Metadata(categorical_limit=5)
    whole = Struct(("a", Scalar(np.int64, metadata=limit)), ("b", List(np.float32)))
    whole.b.lengths.set_metadata(schema.Metadata(expected_value=2.5))
    assert whole.clone().field_metadata() == [limit, schema.Metadata(expected_value=2.5), None]
    assert whole != Struct(("a", np.int64), ("b", List(np.float32)))
    with pytest.raises(AssertionError, match="only in integral fields"):
        Scalar(np.float32, metadata=limit)


def test_values_become_arrays_of_the_type() -> None:
    assert Scalar(np.float32, [1, 2]).get().dtype == np.float32
    assert Scalar((np.float32, 3), []).get().shape == (0, 3)
    assert Scalar(np.int32, 7).get().tolist() == [7]
    assert Scalar(np.int32, np.zeros((4, 2))).dtype.shape == (2,)
    assert Scalar((np.int32, 1)).shape == (1,)
    with pytest.raises(ValueError, match="ambiguous"):
        Scalar(np.int32, "x")
    with pytest.raises(AssertionError, match="Expected float32, got int64"):
        Scalar(np.float32).set_value(np.arange(2), throw_on_type_mismatch=True)


def test_lists_and_maps_from_names() -> None:
    whole = Struct(("a", np.int32), ("b", List(np.int64)), ("c", Map(np.int32, np.float32)))
    found = schema.from_column_list(whole.field_names(), whole.field_types())
    assert found == whole
    assert isinstance(found.b, List)
    assert found["c:values:keys"] is found.c.keys
    with pytest.raises(KeyError):
        _ = found["b:items"]


def test_the_structure_of_a_type() -> None:
    kind = np.dtype([("x", np.int32), ("y", np.float32, (2,))])
    assert schema.from_dtype(kind) == Struct(("x", np.int32), ("y", (np.float32, (2,))))


def test_records_are_pickled() -> None:
    whole = pickle.loads(pickle.dumps(record()))
    assert whole == record()
    assert getattr(whole, "nothing", None) is None


def test_a_column_of_unknown_type_is_of_floats() -> None:
    net = core.Net("unknown")
    made = schema.InitEmptyRecord(net, schema.RawTuple(1))
    workspace.RunNetOnce(net)
    assert workspace.FetchBlob(made.field_0()).dtype == np.float32
    with pytest.raises(TypeError, match="Unknown dtype"):
        schema.InitEmptyRecord(net, schema.RawTuple(1), enforce_types=True)


@pytest.mark.parametrize("kind", [np.float32, np.int64, str, bool])
def test_types_of_tensors(kind: type) -> None:
    assert schema.dtype_for_core_type(schema.data_type_for_dtype(np.dtype(kind))) == kind


def test_lists_with_dropped_values() -> None:
    whole = schema.MapWithEvicted(np.int64, np.float32)
    assert whole.field_names() == ["lengths", "values:keys", "values:values", "_evicted_values"]
    assert whole.clone_schema() == whole

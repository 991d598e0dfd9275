"""Records: columns by name, blobs, nets' inputs and outputs."""

from __future__ import annotations

import numpy as np
import pytest

from poseidon.caffe2 import core, schema, workspace
from poseidon.caffe2.schema import List, Map, NewRecord, Scalar, Struct


def record() -> Struct:
    return Struct(
        ("a", np.float32), ("b", Struct(("c", np.int64), ("d", List(np.float32)))), ("b:e", (np.int32, (2,)))
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
    with pytest.raises(AssertionError, match="Duplicate field name: a"):
        Struct(("a", np.int32), ("a", np.int32))


def test_blobs_of_a_record() -> None:
    net = core.Net("records")
    assert not record().has_blobs()
    with pytest.raises(AssertionError, match="not set"):
        record().a()
    made = NewRecord(net, record())
    assert [str(blob) for blob in made.field_blobs()] == made.field_names()
    assert made.clone(keep_blobs=False) == record() != made
    assert schema.equal_schemas(made, record())
    assert schema.is_schema_subset(made[["a"]], record())


def test_records_are_added() -> None:
    both = Struct(("a", np.int32), ("s", Struct(("x", np.int32)))) + Struct(("s", Struct(("y", np.int32))))
    assert both.field_names() == ["a", "s:x", "s:y"]


def test_records_are_fed_and_fetched() -> None:
    workspace.ResetWorkspace()
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
    workspace.ResetWorkspace()


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

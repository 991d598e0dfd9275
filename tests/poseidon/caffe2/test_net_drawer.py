"""Drawings of nets."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from poseidon.caffe2 import core, net_drawer
from poseidon.caffe2.proto.caffe2_pb2 import NetDef

pytest.importorskip("pydot")


def net_of() -> core.Net:
    net = core.Net("drawn")
    net.Relu("x", "x")
    net.Tanh("x", "y")
    net.Add(["x", "y"], "z", name='with "quotes"')
    return net


def edges(graph: object) -> list[tuple[str, str]]:
    return [(edge.get_source(), edge.get_destination()) for edge in graph.get_edges()]  # type: ignore[attr-defined]


def test_a_blob_that_is_written_again_is_another_node() -> None:
    graph = net_drawer.GetPydotGraph(net_of(), name="drawing")
    assert '"x_0"' in graph.to_string() and '"x_1"' in graph.to_string()
    assert len(edges(graph)) == 7


def test_operators_only() -> None:
    assert len(edges(net_drawer.GetPydotGraphMinimal(net_of().Proto()))) == 3
    assert len(edges(net_drawer.GetPydotGraphMinimal(net_of(), minimal_dependency=True))) == 2


def test_a_plan() -> None:
    plan = core.Plan("plan")
    plan.AddStep(core.execution_step("s", [net_of(), net_of()]))
    assert len(edges(net_drawer.GetPlanGraph(plan.Proto()))) == 1


def test_json(tmp_path: Path) -> None:
    net_drawer.GetGraphInJson(net_of(), str(tmp_path / "net.json"))
    found = json.loads((tmp_path / "net.json").read_text())
    assert [node["label"] for node in found["nodes"]] == ["Relu", "x", "Tanh", "y", "Add", "z"]
    assert {"source": 1, "target": 4} in found["edges"]


def test_the_nets_of_a_plan_by_name() -> None:
    plan = core.Plan("plan")
    plan.AddStep(core.execution_step("s", [net_of()]))
    (name,) = net_drawer.GetOperatorMapForPlan(plan.Proto())
    assert name == f"plan_{plan.Nets()[0].Name()}"


@pytest.mark.parametrize("binary", [False, True])
@pytest.mark.parametrize("options", [[], ["--minimal", "--append_output", "--minimal_dependency"]])
def test_the_command(
    binary: bool, options: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    net, plan = net_of(), core.Plan("plan")
    plan.AddStep(core.execution_step("s", [net]))
    for message, name in ((net.Proto(), net.Name()), (plan.Proto(), f"plan_{net.Name()}")):
        path = tmp_path / "input"
        path.write_bytes(message.SerializeToString() if binary else str(message).encode())
        assert net_drawer.main([f"--input={path}", f"--output_prefix={tmp_path}/p_", *options]) == 0
        assert "digraph" in (tmp_path / f"p_{name}.dot").read_text()
    assert "Wrote" in capsys.readouterr().out
    path.write_bytes(b"no net")
    assert net_drawer.main([f"--input={path}"]) == 1
    assert "cannot be read as a NetDef or a PlanDef" in capsys.readouterr().err
    path.write_bytes(NetDef(name="a\x1b[2J").SerializeToString())
    assert net_drawer.main([f"--input={path}", f"--output_prefix={tmp_path}/p_"]) == 0
    assert r"p_a\x1b[2J.dot" in capsys.readouterr().out


@pytest.mark.needs("dot")
def test_a_picture() -> None:
    picture = net_drawer.GetGraphPngSafe(net_drawer.GetPydotGraph, net_of(), "drawing")
    assert picture is not None and picture.startswith(b"\x89PNG")


def test_a_failure_is_a_log_line(caplog: pytest.LogCaptureFixture) -> None:
    assert net_drawer.GetGraphPngSafe(lambda: 1 / 0) is None
    assert "Failed to draw graph: division by zero" in caplog.text

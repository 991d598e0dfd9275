"""The table at the start of a job: layers, shapes, parameters, and the shards of each."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from poseidon.base.text_columns import aligned
from poseidon.caffe.net.net import Net
from ps_server import StoreSpec
from ps_server.protocol.placement import place

HEAD = ("layer", "type", "top", "parameters", "bytes", "on")


def net_table(net: Net, tables: Sequence[Sequence[str]], store: StoreSpec | None) -> list[str]:
    """Return the lines of the table.

    Args:
        tables: names of the tensors in each table of the store, by table id.
        store: None if each worker holds all values itself.
    """
    shards_by_name = _shards_by_name(tables, store)
    shapes = net.blob_shapes
    rows = [HEAD]
    total = 0
    for (name, layer), step in zip(net.layer_modules, net.plan.steps, strict=True):
        mine = [info for info in net.parameters_info if info.layer == name]
        count = sum(prod(info.shape) for info in mine)
        total += count
        tops = [shapes[top] for top in layer.param.top if top in shapes]
        where = sorted({shard for info in mine for shard in shards_by_name.get(info.name, ())})
        rows.append(
            (
                name,
                layer.param.type,
                " ".join("x".join(map(str, shape)) or "1" for shape in tops[: len(step.tops)]),
                " ".join("x".join(map(str, info.shape)) for info in mine),
                f"{4 * count:,}" if count else "",
                _ranges(where) if store else ("here" if mine else ""),
            )
        )
    rows.append(("total", "", "", f"{total:,} values", f"{4 * total:,}", ""))
    return aligned(rows)


def _shards_by_name(
    tables: Sequence[Sequence[str]], store: StoreSpec | None
) -> dict[str, set[int]]:
    if store is None:
        return {}
    return {
        name: {chunk.shard for chunk in row}
        for names, row in zip(tables, place(store).chunks, strict=True)
        for name in names
    }


def _ranges(shards: Sequence[int]) -> str:
    """Return shards 0, 1, 2 and 5 as `shard 0-2,5`."""
    parts: list[list[int]] = []
    for shard in shards:
        if parts and parts[-1][-1] == shard - 1:
            parts[-1][1:] = [shard]
        else:
            parts.append([shard])
    text = ",".join("-".join(map(str, part)) for part in parts)
    return f"shard {text}" if text else ""

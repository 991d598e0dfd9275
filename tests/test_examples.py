"""The examples' definitions say what their READMEs promise."""

from __future__ import annotations

from pathlib import Path

from poseidon.layers.registry import layer_class
from poseidon.net.plan import plan_net
from poseidon.proto.definition import read_net


def test_the_net_for_feature_extraction_is_caffenet(repository: Path) -> None:
    definition = read_net(repository / "examples" / "feature_extraction" / "imagenet_val.prototxt")
    data = definition.param.layer[0]
    assert (data.type, list(data.top)) == ("ImageData", ["data", "label"])
    assert data.image_data_param.shared_file_system
    data.type = "Input"  # the plan needs no pictures
    plan = plan_net(definition, layer_class)
    assert {"fc7", "prob"} <= plan.names.keys()
    outputs = {
        layer.name: layer.inner_product_param.num_output
        for layer in definition.param.layer
        if "fc" in layer.name
    }
    assert outputs == {"fc6": 4096, "fc7": 4096, "fc8": 1000}

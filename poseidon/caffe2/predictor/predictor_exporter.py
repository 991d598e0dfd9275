"""Predictors as databases: their nets and parameters, under Caffe2's keys."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Iterable, Mapping
from typing import Any

from poseidon.caffe2 import core, scope, workspace
from poseidon.caffe2.predictor import predictor_py_utils
from poseidon.caffe2.predictor import predictor_py_utils as utils
from poseidon.caffe2.predictor_constants import predictor_constants
from poseidon.caffe2.proto import DEVICE_NUMBERS, caffe2_pb2, metanet_pb2

_Fields = namedtuple(
    "_Fields",
    "predict_net parameters inputs outputs shapes name extra_init_net global_init_net net_type "
    "num_workers trainer_prefix",
)


class PredictorExportMeta(_Fields):
    """A predictor to be saved: its net, its parameters, inputs and outputs."""

    __slots__ = ()

    def __new__(
        cls,
        predict_net: Any,
        parameters: Iterable[Any],
        inputs: Iterable[Any],
        outputs: Iterable[Any],
        shapes: Mapping[str, Any] | None = None,
        name: str = "",
        extra_init_net: Any = None,
        global_init_net: Any = None,
        net_type: str | None = None,
        num_workers: int | None = None,
        trainer_prefix: str | None = None,
    ) -> PredictorExportMeta:
        """Make the description of a predictor.

        Args:
            predict_net: a net, a plan, or the message of one.
            parameters, inputs, outputs: blobs or their names.
            shapes: shapes of inputs and outputs; by default as in the workspace.
            name: tells the predictors of one file apart.
            extra_init_net: a net that runs behind the one that fills inputs and outputs with zeros.
            global_init_net: a net that runs behind the one that loads the parameters.
            net_type, num_workers: of the net that predicts.
            trainer_prefix: the type of the trainer.

        Raises:
            AssertionError: an input is there twice, or a parameter is an input or an output too.
        """
        parameters = [str(blob) for blob in parameters]
        inputs = [str(blob) for blob in inputs]
        outputs = [str(blob) for blob in outputs]
        assert len(set(inputs)) == len(inputs), f"a predictor's inputs are not unique: {inputs}"
        for what, blobs in (("inputs", inputs), ("outputs", outputs)):
            both = sorted(set(parameters).intersection(blobs))
            assert not both, f"Parameters and {what} of a predictor must be disjoint: {both}"
        if isinstance(predict_net, (core.Net, core.Plan)):
            predict_net = predict_net.Proto()
        assert isinstance(predict_net, (caffe2_pb2.NetDef, caffe2_pb2.PlanDef)), (
            f"predict_net must be a net or a plan, not {type(predict_net).__name__}"
        )
        rest = (extra_init_net, global_init_net, net_type, num_workers, trainer_prefix)
        return super().__new__(
            cls, predict_net, parameters, inputs, outputs, shapes or {}, name, *rest
        )

    def inputs_name(self) -> str:
        return utils.get_comp_name(predictor_constants.INPUTS_BLOB_TYPE, self.name)

    def outputs_name(self) -> str:
        return utils.get_comp_name(predictor_constants.OUTPUTS_BLOB_TYPE, self.name)

    def parameters_name(self) -> str:
        return utils.get_comp_name(predictor_constants.PARAMETERS_BLOB_TYPE, self.name)

    def global_init_name(self) -> str:
        """Return the key of the net that loads the parameters."""
        return utils.get_comp_name(predictor_constants.GLOBAL_INIT_NET_TYPE, self.name)

    def predict_init_name(self) -> str:
        """Return the key of the net that fills inputs and outputs."""
        return utils.get_comp_name(predictor_constants.PREDICT_INIT_NET_TYPE, self.name)

    def predict_net_name(self) -> str:
        """Return the key of the net that predicts."""
        return utils.get_comp_name(predictor_constants.PREDICT_NET_TYPE, self.name)

    def train_init_plan_name(self) -> str:
        """Return the key of the plan that begins a training."""
        plan_name = utils.get_comp_name(predictor_constants.TRAIN_INIT_PLAN_TYPE, self.name)
        return f"{self.trainer_prefix}_{plan_name}" if self.trainer_prefix else plan_name

    def train_plan_name(self) -> str:
        """Return the key of the plan that trains."""
        plan_name = utils.get_comp_name(predictor_constants.TRAIN_PLAN_TYPE, self.name)
        return f"{self.trainer_prefix}_{plan_name}" if self.trainer_prefix else plan_name


def get_predictor_exporter_helper(submodelNetName: str) -> PredictorExportMeta:
    """Return an empty predictor of a name, for the names of its parts."""
    return PredictorExportMeta(core.Net(submodelNetName), [], [], [], name=submodelNetName)


def prepare_prediction_net(filename: str, db_type: str, device_option: Any = None) -> core.Net:
    """Load a predictor and create its net in the current workspace; return the net.

    Args:
        filename, db_type: the database.
        device_option: the device of all operators, in place of their own.
    """
    meta_net_def = load_from_db(filename, db_type, device_option)
    workspace.RunNetOnce(utils.GetNet(meta_net_def, predictor_constants.GLOBAL_INIT_NET_TYPE))
    workspace.RunNetOnce(utils.GetNet(meta_net_def, predictor_constants.PREDICT_INIT_NET_TYPE))
    predict_net = core.Net(utils.GetNet(meta_net_def, predictor_constants.PREDICT_NET_TYPE))
    workspace.CreateNet(predict_net)
    return predict_net


def _global_init_net(predictor_export_meta: PredictorExportMeta) -> Any:
    reader = predictor_constants.PREDICTOR_DBREADER
    net = core.Net("global-init")
    net.Load([reader], predictor_export_meta.parameters)
    if reader not in net.Proto().external_input:
        net.Proto().external_input.append(reader)
    net.Proto().external_output.extend(predictor_export_meta.parameters)
    if predictor_export_meta.global_init_net:
        net.AppendNet(predictor_export_meta.global_init_net)
    utils.AddModelIdArg(predictor_export_meta, net.Proto())
    return net.Proto()


def get_meta_net_def(
    predictor_export_meta: PredictorExportMeta, ws: Any = None, db_type: str | None = None
) -> Any:
    """Return a predictor's MetaNetDef: three nets, names of parameters, inputs and outputs."""
    meta = predictor_export_meta
    ws = ws or workspace.C.Workspace.current
    meta_net_def = metanet_pb2.MetaNetDef()
    utils.AddNet(meta_net_def, meta.predict_init_name(), utils.create_predict_init_net(ws, meta))
    utils.AddNet(meta_net_def, meta.global_init_name(), _global_init_net(meta))
    utils.AddNet(meta_net_def, meta.predict_net_name(), utils.create_predict_net(meta))
    utils.AddBlobs(meta_net_def, meta.parameters_name(), meta.parameters)
    utils.AddBlobs(meta_net_def, meta.inputs_name(), meta.inputs)
    utils.AddBlobs(meta_net_def, meta.outputs_name(), meta.outputs)
    return meta_net_def


def set_model_info(meta_net_def: Any, project_str: str, model_class_str: str, version: str) -> None:
    assert isinstance(meta_net_def, metanet_pb2.MetaNetDef)
    meta_net_def.modelInfo.project = project_str
    meta_net_def.modelInfo.modelClass = model_class_str
    meta_net_def.modelInfo.version = version


def save_to_db(
    db_type: str,
    db_destination: str,
    predictor_export_meta: PredictorExportMeta,
    use_ideep: bool = False,
    *args: Any,
    **kwargs: Any,
) -> None:
    """Write a predictor, with the parameters of the current workspace, to a database.

    Args:
        db_type, db_destination: the database.
        predictor_export_meta: the predictor.
        use_ideep: accepted; tensors are on the CPU.
        args: further arguments of `get_meta_net_def`.
        kwargs: arguments of that and of the operator Save.

    Raises:
        RuntimeError: a parameter is not in the workspace, or the database cannot be written.
    """
    meta_net_def = get_meta_net_def(predictor_export_meta, *args)
    with core.DeviceScope(core.DeviceOption(DEVICE_NUMBERS["CPU"])):
        workspace.FeedBlob(
            predictor_constants.META_NET_DEF,
            predictor_py_utils.serialize_protobuf_struct(meta_net_def),
        )
    blobs = [predictor_constants.META_NET_DEF, *predictor_export_meta.parameters]
    save = core.CreateOperator(
        "Save",
        blobs,
        [],
        device_option=core.DeviceOption(DEVICE_NUMBERS["CPU"]),
        absolute_path=True,
        db=db_destination,
        db_type=db_type,
        **kwargs,
    )
    workspace.RunOperatorOnce(save)


def load_from_db(
    filename: str, db_type: str, device_option: Any = None, *args: Any, **kwargs: Any
) -> Any:
    """Return a predictor's MetaNetDef; its global init net loads the parameters.

    Args:
        filename, db_type: the database.
        device_option: the device of all operators; by default the device scope's, else their own.
        args, kwargs: accepted; Caffe2's loaders pass them on.

    Raises:
        RuntimeError: the database cannot be read, or holds no predictor.
    """
    reader, name = predictor_constants.PREDICTOR_DBREADER, predictor_constants.META_NET_DEF
    for operator in (
        core.CreateOperator(
            "CreateDB", [], [core.BlobReference(reader)], db=filename, db_type=db_type
        ),
        core.CreateOperator("Load", [core.BlobReference(reader)], [core.BlobReference(name)]),
    ):
        assert workspace.RunOperatorOnce(operator), f"Cannot read the predictor {filename}"
    blob = workspace.FetchBlob(name)
    meta_net_def = predictor_py_utils.deserialize_protobuf_struct(
        blob if isinstance(blob, bytes) else str(blob).encode(), metanet_pb2.MetaNetDef
    )
    device_option = scope.CurrentDeviceScope() if device_option is None else device_option
    if device_option is not None:
        for net in meta_net_def.nets:
            for op in net.value.op:
                op.device_option.CopyFrom(device_option)
    return meta_net_def

"""Conditional random fields over sequences of labels: the loss, and the most probable labels.

The labels have two more beside them: one before the first and one behind the last step.
"""

from __future__ import annotations

from typing import Any

from poseidon.caffe2 import core, recurrent
from poseidon.caffe2.model_helper import ModelHelper

UNLIKELY = -1000.0
"""The score of labels that a step cannot have."""
SCOPE = "crf_net"


class CRFWithLoss:
    """The negative logarithm of the likelihood of labels (Lafferty et al., 2001).

    Attributes:
        model: the model that the operators go to.
        num_classes: the number of labels.
        num_classes_padded: with the two that mark start and end.
        transitions: the blob of the scores of pairs of labels, which is learned.
    """

    def __init__(self, model: Any, num_classes: int, transitions_blob: Any = None) -> None:
        """Set up the loss; without a blob the transitions begin uniform between -1 and 1."""
        self.model = model
        self.num_classes = num_classes
        self.num_classes_padded = num_classes + 2
        if transitions_blob is None:
            transitions_blob = model.param_init_net.UniformFill(
                [], ["crf_transitions"], shape=[self.num_classes_padded] * 2, min=-1.0, max=1.0
            )
        self.transitions = transitions_blob

    def crf_loss(self, predictions: Any, labels: Any, seq_lengths: Any = None) -> Any:
        """Return the loss of one sequence, a scalar.

        Args:
            predictions: scores, (steps, labels).
            labels: integers, (steps,).
            seq_lengths: kept for Caffe2's scripts.
        """
        net = self.model.net
        # updates of the parameter may come between its readers
        transitions = net.Copy(self.transitions)
        scores, path = self._padded(predictions, labels)
        marks = net.OneHot([path, self._number(self.num_classes_padded)], 1)
        unary = net.SumElements(net.Mul([scores, marks], 1))
        before = net.Slice([marks], starts=[0, 0], ends=[-2, -1])
        behind = net.Slice([marks], starts=[1, 0], ends=[-1, -1])
        pairs = net.MatMul([before, behind], 1, trans_a=1)
        binary = net.SumElements(net.Mul([transitions, pairs], 1))
        initial = net.Slice([scores], starts=[0, 0], ends=[1, -1])
        rest = net.ExpandDims(net.Slice([scores], starts=[1, 0], ends=[-1, -1]), dims=[1])
        last = self.build_crf_net(rest, initial, net.Copy(transitions))
        flat = net.FlattenToVec(last)
        every = net.SortedSegmentRangeLogSumExp([flat, f"{SCOPE}/zero_segment_id"], 1)
        every, _ = net.Reshape([every], outputs=2, shape=[1])
        path_score, _ = net.Reshape([net.Add([unary, binary], 1)], outputs=2, shape=[1])
        return net.Sub([every, path_score], 1)

    def _number(self, value: int) -> Any:
        return self.model.param_init_net.ConstantFill(
            [], 1, shape=[1], value=value, dtype=core.DataType.INT64
        )

    def _padded(self, predictions: Any, labels: Any) -> tuple[Any, Any]:
        """Return scores and labels with the two more labels, and with a step for each of them."""
        net, fill = self.model.net, self.model.param_init_net
        count = self.num_classes
        unlikely = net.ConstantFill([labels], 1, extra_shape=[2], value=UNLIKELY)
        wide, _ = net.Concat([predictions, unlikely], outputs=2, axis=1)
        ends = [
            fill.GivenTensorFill(
                [],
                1,
                shape=[1, count + 2],
                values=[0.0 if place == mark else UNLIKELY for place in range(count + 2)],
            )
            for mark in (count, count + 1)
        ]
        scores, _ = net.Concat([ends[0], wide, ends[1]], outputs=2, axis=0)
        marked, _ = net.Concat(
            [
                self._number(count),
                net.Cast([labels], 1, to=core.DataType.INT64),
                self._number(count + 1),
            ],
            outputs=2,
            axis=0,
        )
        return scores, marked

    def build_crf_net(self, input_blob: Any, initial_state: Any, transitions: Any) -> Any:
        """Add the network that sums over all paths; return the log sums by last label.

        Args:
            input_blob: scores, (steps, 1, labels).
            initial_state: scores of the step before, (1, labels).
            transitions: see the class.
        """
        count = self.num_classes_padded
        segments = self.model.param_init_net.ConstantFill(
            [], [f"{SCOPE}/zero_segment_id"], value=0, shape=[count], dtype=core.DataType.INT32
        )
        step = ModelHelper(name="crf_step", param_model=self.model)
        row, state, *_ = step.net.AddExternalInputs("input_t", "cell_t_prev", transitions, segments)
        net = step.net
        names = [f"{SCOPE}/column", f"{SCOPE}/old_shape"]
        column, _ = net.Reshape([state], names, shape=[count, 1])
        from_each = net.Tile([column], [f"{SCOPE}/from_each"], tiles=count, axis=1)
        line, _ = net.Reshape([row], [f"{SCOPE}/line", f"{SCOPE}/old_line"], shape=[1, count])
        to_each = net.Tile([line], [f"{SCOPE}/to_each"], tiles=count, axis=0)
        both = net.Add([from_each, to_each], [f"{SCOPE}/both"])
        paths = net.Add([both, transitions], [f"{SCOPE}/paths"])
        summed = net.SortedSegmentRangeLogSumExp([paths, segments], [f"{SCOPE}/summed"])
        new, _ = net.Reshape([summed], [f"{SCOPE}/new", f"{SCOPE}/old_sums"], shape=[1, 1, count])
        net.AddExternalOutputs(new)
        _, last = recurrent.recurrent_net(
            net=self.model.net,
            cell_net=net,
            inputs=[(row, input_blob)],
            initial_cell_inputs=[(state, initial_state)],
            links={state: new},
            scope=SCOPE,
            outputs_with_grads=(1,),
        )
        return last

    def update_predictions(self, classes: Any) -> Any:
        """Return scores in which the most probable labels have the largest score of each step.

        Args:
            classes: scores, (steps, labels).
        """
        net, count = self.model.net, self.num_classes
        inner = net.Slice([self.transitions], starts=[0, 0], ends=[-3, -3])
        starts = net.Slice([self.transitions], starts=[count, 0], ends=[count + 1, -3])
        ends = net.Transpose(
            [net.Slice([self.transitions], starts=[0, count + 1], ends=[-3, -1])], 1
        )
        first = net.Add([net.Slice([classes], starts=[0, 0], ends=[1, -1]), starts], 1)
        rest = net.Slice([classes], starts=[1, 0], ends=[-1, -1])
        begun, _ = net.Concat([first, rest], outputs=2, axis=0)
        last = net.Add([net.Slice([begun], starts=[-2, 0], ends=[-1, -1]), ends], 1)
        rest = net.Slice([begun], starts=[0, 0], ends=[-2, -1])
        whole, _ = net.Concat([rest, last], outputs=2, axis=0)
        return net.SwapBestPath([classes, net.ViterbiPath([whole, inner], 1)], 1)

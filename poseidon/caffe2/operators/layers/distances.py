"""Distances, similarities and rankings of pairs, and accuracies."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from poseidon.caffe2.operators.gradients import GradientMaker
from poseidon.caffe2.operators.input_shapes import check_count, check_tensor
from poseidon.caffe2.operators.registry import operator
from poseidon.caffe2.operators.sparse.segments import column, ids_of

EPSILON = 1e-12


def _rows(x: Tensor) -> Tensor:
    """Return x as a matrix with its first dimension; a vector has rows of one element."""
    return x.reshape(x.shape[0], x.shape[1:].numel()) if x.dim() else x.reshape(1, 1)


@operator(
    "SquaredL2Distance",
    gradient="SquaredL2DistanceGradient(I0, I1, GO0) -> GI0, GI1",
    shapes="*S, *S",
)
def squared_l2_distance(x: Tensor, y: Tensor) -> Tensor:
    """Return half the sum of squared differences of each row."""
    return 0.5 * _rows((x - y) ** 2).sum(1)


@operator("SquaredL2DistanceGradient", expected="*S, *S, N")
def squared_l2_distance_gradient(x: Tensor, y: Tensor, dz: Tensor) -> tuple[Tensor, Tensor]:
    dx = column(dz, x) * (x - y)
    return dx, -dx


@operator("L1Distance", gradient="L1DistanceGradient(I0, I1, GO0) -> GI0, GI1", shapes="*S, *S")
def l1_distance(x: Tensor, y: Tensor) -> Tensor:
    """Return the sum of absolute differences of each row."""
    return _rows((x - y).abs()).sum(1)


@operator("L1DistanceGradient", expected="*S, *S, N")
def l1_distance_gradient(x: Tensor, y: Tensor, dz: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of `L1Distance`; a difference below 1e-12 has none."""
    difference = x - y
    dx = column(dz, x) * torch.where(difference.abs() < EPSILON, 0, difference.sign())
    return dx, -dx


@operator("DotProduct", gradient="DotProductGradient(I0, I1, GO0) -> GI0, GI1", shapes="*S, *S")
def dot_product(x: Tensor, y: Tensor) -> Tensor:
    """Return the product of each pair of rows."""
    return _rows(x * y).sum(1)


@operator("DotProductGradient", expected="*S, *S, N")
def dot_product_gradient(x: Tensor, y: Tensor, dz: Tensor) -> tuple[Tensor, Tensor]:
    spread = column(dz, x)
    return spread * y, spread * x


def _widened(short: Tensor, width: int, pad_value: float, replicate: bool) -> Tensor:
    """Return rows made as wide as others: with a value at their end, or repeated."""
    if replicate:
        return short.repeat(1, width // max(short.shape[1], 1))
    return functional.pad(short, (0, width - short.shape[1]), value=pad_value)


def _same_width(x: Tensor, y: Tensor, pad_value: float, replicate: bool) -> list[Tensor]:
    """Return two matrices as wide as the wider of them."""
    pair = _rows(x), _rows(y)
    width = max(rows.shape[1] for rows in pair)
    return [
        _widened(rows, width, pad_value, replicate) if rows.shape[1] < width else rows
        for rows in pair
    ]


def _padded_rule(maker: GradientMaker) -> None:
    inputs, outputs = [maker.I(0), maker.I(1), maker.GO(0)], [maker.GI(0), maker.GI(1)]
    own = {
        "pad_value": float(maker.argument("pad_value", 0)),
        "replicate": maker.argument("replicate", 0),
    }
    maker.op("DotProductWithPaddingGradient", inputs, outputs, own, copy=True)


@operator("DotProductWithPadding", gradient=_padded_rule, expected="N *, N *")
def dot_product_with_padding(
    x: Tensor, y: Tensor, *, pad_value: float = 0.0, replicate: bool = False
) -> Tensor:
    """Return the product of each pair of rows; the shorter rows are filled up, or repeated."""
    a, b = _same_width(x, y, pad_value, replicate)
    return (a * b).sum(1)


@operator("DotProductWithPaddingGradient", expected="N *, N *, N")
def dot_product_with_padding_gradient(
    x: Tensor, y: Tensor, dz: Tensor, *, pad_value: float = 0.0, replicate: bool = False
) -> tuple[Tensor, Tensor]:
    a, b = _same_width(x, y, pad_value, replicate)
    spread = dz.reshape(-1, 1)
    return _narrowed(spread * b, x, replicate), _narrowed(spread * a, y, replicate)


def _narrowed(gradient: Tensor, like: Tensor, replicate: bool) -> Tensor:
    width = _rows(like).shape[1]
    if replicate:
        repeats = gradient.reshape(len(gradient), gradient.shape[1] // max(width, 1), width)
        return repeats.sum(1).reshape(like.shape)
    return gradient[:, :width].reshape(like.shape)


def _norms(rows: Tensor) -> Tensor:
    result: Tensor = torch.linalg.vector_norm(rows, dim=1).clamp(min=EPSILON)
    return result


@operator(
    "CosineSimilarity",
    gradient="CosineSimilarityGradient(I0, I1, GO0) -> GI0, GI1",
    shapes="*S, *S",
)
def cosine_similarity(x: Tensor, y: Tensor) -> Tensor:
    """Return the cosine of the angle of each pair of rows."""
    a, b = _rows(x), _rows(y)
    norms = _norms(a) * _norms(b)
    return (a * b).sum(1) / norms


@operator("CosineSimilarityGradient", expected="N *S, N *S, N")
def cosine_similarity_gradient(x: Tensor, y: Tensor, dz: Tensor) -> tuple[Tensor, Tensor]:
    a, b, given = _rows(x), _rows(y), dz.reshape(-1, 1)
    left, right = _norms(a).unsqueeze(1), _norms(b).unsqueeze(1)
    cosine = (a * b).sum(1, keepdim=True) / (left * right)
    dx = given * (b / (left * right) - cosine * a / left**2)
    dy = given * (a / (left * right) - cosine * b / right**2)
    return dx.reshape(x.shape), dy.reshape(y.shape)


def _in_shape_of(x: Tensor, **others: Tensor) -> list[Tensor]:
    """Return other inputs in x's shape; Caffe2 goes through as many values in order."""
    for name, value in others.items():
        check_count(f"the input {name}", value, x.numel())
    return [value.reshape(x.shape) for value in others.values()]


@operator(
    "MarginRankingCriterion", gradient="MarginRankingCriterionGradient(I0, I1, I2, GO0) -> GI0, GI1"
)
def margin_ranking_criterion(x1: Tensor, x2: Tensor, y: Tensor, *, margin: float = 1.0) -> Tensor:
    """Return max(0, margin - y * (x1 - x2)) in the shape of x1; the others have as many values."""
    x2, y = _in_shape_of(x1, x2=x2, y=y)
    return (margin - y * (x1 - x2)).clamp(min=0)


@operator("MarginRankingCriterionGradient")
def margin_ranking_criterion_gradient(
    x1: Tensor, x2: Tensor, y: Tensor, dz: Tensor, *, margin: float = 1.0
) -> tuple[Tensor, Tensor]:
    second, y, dz = _in_shape_of(x1, x2=x2, y=y, gradient=dz)
    dx = torch.where(margin - y * (x1 - second) >= 0, -y * dz, 0)
    return dx, -dx.reshape(x2.shape)


@operator(
    "CosineEmbeddingCriterion", gradient="CosineEmbeddingCriterionGradient(I0, I1, GO0) -> GI0"
)
def cosine_embedding_criterion(s: Tensor, y: Tensor, *, margin: float = 0.0) -> Tensor:
    """Return 1 - s for a pair that belongs together (y = 1), else max(0, s - margin)."""
    (y,) = _in_shape_of(s, y=y)
    return torch.where(y == 1, 1 - s, (s - margin).clamp(min=0))


@operator("CosineEmbeddingCriterionGradient")
def cosine_embedding_criterion_gradient(
    s: Tensor, y: Tensor, dz: Tensor, *, margin: float = 0.0
) -> Tensor:
    y, dz = _in_shape_of(s, y=y, gradient=dz)
    return torch.where(y == 1, -dz, torch.where(s >= margin, dz, 0))


def _sessions(x: Tensor, lengths: Tensor | None) -> list[int]:
    return [x.shape[0]] if lengths is None else lengths.tolist()


def _differences(x: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return for each ordered pair (i, j) x_j - x_i, and whether label i is the larger."""
    return x[None, :] - x[:, None], labels[:, None] > labels[None, :]


@operator(
    "PairWiseLoss", gradient="PairWiseLossGradient(I0, I1, GO0, I2?) -> GI0", expected="N *, N *, M"
)
def pair_wise_loss(x: Tensor, labels: Tensor, lengths: Tensor | None = None) -> Tensor:
    """Return each session's mean of log(1 + exp(x_j - x_i)) over pairs with the larger label i."""
    sizes = _sessions(x, lengths)
    losses = []
    for values, wanted in zip(
        x.reshape(-1).split(sizes), labels.reshape(-1).split(sizes), strict=True
    ):
        differences, ordered = _differences(values, wanted)
        pairs = ordered.sum().clamp(min=1)
        losses.append((functional.softplus(differences) * ordered).sum() / pairs)
    return torch.stack(losses) if losses else x.new_zeros(0)


@operator("PairWiseLossGradient", expected="N *, N *, M, M")
def pair_wise_loss_gradient(
    x: Tensor, labels: Tensor, dy: Tensor, lengths: Tensor | None = None
) -> Tensor:
    sizes, parts = _sessions(x, lengths), []
    pieces = zip(
        x.reshape(-1).split(sizes), labels.reshape(-1).split(sizes), dy.reshape(-1), strict=True
    )
    for values, wanted, given in pieces:
        differences, ordered = _differences(values, wanted)
        slopes = torch.sigmoid(differences) * ordered * given / ordered.sum().clamp(min=1)
        parts.append(slopes.sum(0) - slopes.sum(1))
    return torch.cat(parts).reshape(x.shape) if parts else torch.zeros_like(x)


@operator("Accuracy", shapes="N D, N")
def accuracy(predictions: Tensor, labels: Tensor, *, top_k: int = 1) -> Tensor:
    """Return the part of the rows whose label is among the `top_k` largest, ties in order."""
    picked = labels.reshape(-1, 1).long()
    own = predictions.gather(1, picked)
    earlier = torch.arange(predictions.shape[1], device=predictions.device) < picked
    ahead = (predictions > own) | ((predictions == own) & earlier)
    return (ahead.sum(1) < top_k).float().mean() if len(labels) else predictions.new_zeros(())


@operator("MultiClassAccuracy", shapes="N D, N")
def multi_class_accuracy(predictions: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return for each class the part of its rows that are predicted, and their number."""
    wanted, classes = labels.reshape(-1).long(), predictions.shape[1]
    right = (predictions.argmax(1) == wanted).to(predictions.dtype)
    hits = predictions.new_zeros(classes).index_add(0, wanted, right)
    amounts = torch.bincount(wanted, minlength=classes).int()
    return hits / amounts.clamp(min=1), amounts


@operator("Perplexity")
def perplexity(probabilities: Tensor) -> Tensor:
    """Return the product of p^(-1 / N)."""
    return (probabilities ** (-1 / max(probabilities.numel(), 1))).prod()


def _lambda_session(
    y: Tensor, r: Tensor, dcg_loss: bool, normalise: bool, exponential: bool
) -> tuple[Tensor, Tensor]:
    """Return the loss of one session and its gradient; see `lambda_rank_ndcg`."""
    if not len(y) or r.abs().sum() < 1e-6:
        return y.new_zeros(()), torch.zeros_like(y)
    gain = r if dcg_loss and not exponential else torch.exp2(r)
    place = 1 / torch.log2(torch.arange(2, len(y) + 2, dtype=y.dtype, device=y.device))

    def discount(scores: Tensor) -> Tensor:
        return torch.empty_like(place).index_copy(0, torch.argsort(scores, descending=True), place)

    actual = discount(y)
    ideal = gain @ discount(r)
    weight = ((actual[:, None] - actual) * (gain[:, None] - gain)).abs()
    sign = (r[:, None] > r).to(y.dtype) * 2 - 1
    margin = sign * (y[:, None] - y)
    dy = -(weight * sign * torch.sigmoid(-margin)).sum(1)
    loss = ideal - gain @ actual if dcg_loss else -(weight * functional.logsigmoid(margin)).sum()
    scale = ideal.clamp(min=1e-5) if normalise else torch.ones_like(ideal)
    return loss / scale, dy / scale


@operator(
    "LambdaRankNdcg", gradient="LambdaRankNdcgGradient(I0, I2?, O1, GO0) -> GI0", expected="N, N, M"
)
def lambda_rank_ndcg(
    y: Tensor,
    r: Tensor,
    lengths: Tensor | None = None,
    *,
    use_ndcg_as_loss: bool = False,
    use_idcg_normalization: bool = True,
    use_exp_gain: bool = True,
) -> tuple[Tensor, Tensor]:
    """Return each session's LambdaRank loss and its gradient by y.

    Wu et al., Information Retrieval 13.3, 2010.

    Args:
        y: scores, a vector.
        r: relevances.
        lengths: the number of scores of each session; by default there is one session.
        use_ndcg_as_loss: whether the loss is ideal DCG less DCG; else the pairs', by change of DCG.
        use_idcg_normalization: whether both outputs are divided by the ideal DCG.
        use_exp_gain: whether the gain is 2^r where the DCG is the loss; else r.
    """
    sizes = [len(y)] if lengths is None else lengths.tolist()
    if y.dim() != 1 or y.shape != r.shape or sum(sizes) != len(y):
        raise ValueError(
            "LambdaRankNdcg: scores and relevances must be vectors, as long as all sessions"
        )
    found = [
        _lambda_session(*session, use_ndcg_as_loss, use_idcg_normalization, use_exp_gain)
        for session in zip(y.split(sizes), r.split(sizes), strict=True)
    ]
    if not found:
        return y.new_zeros(0), torch.zeros_like(y)
    losses, gradients = zip(*found, strict=True)
    return torch.stack(losses), torch.cat(gradients)


@operator("LambdaRankNdcgGradient", inputs=(3, 4))
def lambda_rank_ndcg_gradient(y: Tensor, *inputs: Tensor) -> Tensor:
    """Return the gradient of `LambdaRankNdcg`; inputs after y: lengths, if any, dy and dloss."""
    *sessions, dy, dloss = inputs
    check_tensor("the gradient of the scores", dy, tuple(y.shape))
    if not sessions:
        return dy * dloss.reshape(())
    check_tensor("the input of the lengths", sessions[0], (dloss.numel(),))
    return dy * dloss.reshape(-1)[ids_of(sessions[0], len(y))]

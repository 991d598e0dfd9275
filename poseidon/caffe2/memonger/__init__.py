"""Less memory for a net: blobs that are no longer needed lend their names to later ones.

The runtime frees the tensor of such a shared name as soon as its last reader has run.
"""

from __future__ import annotations

from poseidon.caffe2.memonger.assignments import (
    AssignmentAlgorithm,
    LiveRange,
    Statistics,
    blob_nbytes,
    collect_blob_sizes,
    compute_assignments,
    compute_assignments_dp,
    compute_assignments_greedy,
    compute_blob_assignments,
    compute_ranges,
    compute_statistics,
    estimate_memory_usage,
    get_memory_usage,
    get_updated_ranges,
    is_compatible,
    release_blobs_when_used,
    verify_assignments,
)
from poseidon.caffe2.memonger.interference import (
    Optimization,
    apply_assignments,
    apply_recurrent_blob_assignments,
    compute_interference_graph,
    optimize_interference,
    topological_sort_traversal,
    topological_sort_traversal_longest_path,
    verify_graph_equality,
    verify_inplace_blobs,
)
from poseidon.caffe2.memonger.sharing import (
    optimize_inference_fast,
    optimize_inference_for_dag,
    share_grad_blobs,
)

__all__ = [
    "AssignmentAlgorithm",
    "LiveRange",
    "Optimization",
    "Statistics",
    "apply_assignments",
    "apply_recurrent_blob_assignments",
    "blob_nbytes",
    "collect_blob_sizes",
    "compute_assignments",
    "compute_assignments_dp",
    "compute_assignments_greedy",
    "compute_blob_assignments",
    "compute_interference_graph",
    "compute_ranges",
    "compute_statistics",
    "estimate_memory_usage",
    "get_memory_usage",
    "get_updated_ranges",
    "is_compatible",
    "optimize_inference_fast",
    "optimize_inference_for_dag",
    "optimize_interference",
    "release_blobs_when_used",
    "share_grad_blobs",
    "topological_sort_traversal",
    "topological_sort_traversal_longest_path",
    "verify_assignments",
    "verify_graph_equality",
    "verify_inplace_blobs",
]

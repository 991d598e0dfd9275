"""What layers refuse: one sentence that names the layer and its line, what was found and expected."""

from __future__ import annotations

import pytest

from poseidon.errors import DefinitionError
from tests.support.nets import build, stack

REFUSED = """
BN x=2,2 > y | bn_param { bn_mode: LEARN momentum: 0.5 } => expected the fields of one form
BN x=2,2 > y | bn_param { scale_filler { } slope_filler { } } => has scale_filler and a slope_filler
BN x=2,2 > y | bn_param { axis: 3 } => axis is 3, expected 1 or 2
BN x=2,2 > y | bn_param { axis: 2 } => expected 3 to 4
BN x=2,2 > y m | bn_param { momentum: 0.5 } => has 2 tops, expected 1
BN x=2,2 > y m | bn_param { bn_mode: INFERENCE } => has 2 tops, expected 1
Deconvolution x=1,2,5,5 > y | convolution_param { kernel_size: 3 } => missing num_output
Deconvolution x=1,2,5,5 > y | convolution_param { num_output: 3 kernel_size: 3 group: 2 } => num_output is 3
Deconvolution x=1,2,5,5 > y | convolution_param { num_output: 2 } => missing kernel_size
Deconvolution x=1,2,5,5 > y | convolution_param { num_output: 2 kernel_size: 1 pad: 3 } => pad 3x3 is too large
Im2col x=1,2,5,5 > y | convolution_param { } => missing kernel_size
Im2col x=1,2,5,5 > y | convolution_param { kernel_size: 9 } => kernel 9x9 larger than padded input
Im2col x=1,2,5,5 > y | convolution_param { kernel_size: 1 axis: 3 } => no axis after 3
Convolution x=1,2,9,9 > y | convolution_param { num_output: 2 kernel_size: 3 hole: 2 dilation: 2 } => has several of dilation, hole and hole_h/hole_w
Convolution x=1,2,9,9 > y | convolution_param { num_output: 2 kernel_size: 3 hole: 2 hole_h: 2 } => has several of dilation, hole and hole_h/hole_w
SPP x=2,3,4,4 > y | spp_param { } => missing pyramid_height
SPP x=2,3,4 > y | spp_param { pyramid_height: 1 } => expected 4
SPP x=2,3,3,3 > y | spp_param { pyramid_height: 4 } => pyramid level
Pooling x=1,1,5,7 > y | pooling_param { kernel_size: 2 round_mode: CEIL ceil_mode: false } => has round_mode: CEIL and ceil_mode: false
Pooling x=1,1,5,7 > y | pooling_param { kernel_size: 2 stride: 3000000000 } => must be at most 2147483647
Interp x=1,1,5,5 > y | interp_param { } => has no size
Interp x=1,1,5,5 > y | interp_param { height: 3 } => expected at least 1 for both
Interp x=1,1,5,5 > y | interp_param { zoom_factor: 0 } => must be at least 1
Interp x=1,1,5,5 > y | interp_param { zoom_factor: 2 pad_beg: 1 } => expected 0 or less
Interp x=1,1,5,5 > y | interp_param { zoom_factor: 2 pad_beg: -5 } => crop all
Upsample x=1,2,2,3 m=1,2,2,2 > y | upsample_param { } => expected equal shapes
UPSAMPLE { upsample_h: 4 } => only one of upsample_h and upsample_w
UPSAMPLE { upsample_h: 4 upsample_w: 1 } => expected at least 2
UPSAMPLE { scale_h: 4 } => only one of scale_h and scale_w
UPSAMPLE { scale: 2 scale_h: 4 scale_w: 2 } => both scale and scale_h/scale_w
UPSAMPLE { scale: 1 } => expected at least 2
UPSAMPLE { scale: 3 pad_out_h: true } => need a scale of 2
Reorg x=1,4,4,4 > y | reorg_param { } => missing stride
Reorg x=1,4,4,4 > y | reorg_param { stride: 0 } => stride is 0, expected at least 1
Reorg x=1,6,4,4 > y | reorg_param { stride: 2 } => 6 channels, expected a multiple of stride
Reorg x=1,4,3,4 > y | reorg_param { stride: 2 } => bottom is 3x4, expected multiples of stride 2
Reorg x=4,4 > y | reorg_param { stride: 2 } => expected 4
Interp x=1,1,5,5 z=1,1,4,7 > y | interp_param { height: 2 width: 2 } => has 2 bottoms and use_blob_size: false, expected a second bottom with use_blob_size: true
LSTM x=4,3,5 k=4,3 > y | recurrent_param { } => missing num_output
RNN x=4,3 k=4,3 > y | recurrent_param { num_output: 2 } => bottom 0 has shape
RNN x=4,3,5 k=3,4 > y | recurrent_param { num_output: 2 } => has shape 3x4, expected 4x3
LSTM x=4,3,5 k=4,3 s=4,2 > y | recurrent_param { num_output: 2 } => bottom 2 has shape 4x2, expected 3x
LSTM x=4,3,5 > y | recurrent_param { num_output: 2 } => has 1 bottom, expected 2 to 3
LSTM x=4,3,5 k=4,3 > y h c | recurrent_param { num_output: 2 expose_hidden: true } => has 2 bottoms, expected 4 to 5
RNN x=4,3,5 k=4,3 > y h | recurrent_param { num_output: 2 } => has 2 tops, expected exactly 1
RNN x=4,3,5 k=4,3 h=1,3,3 > y z | recurrent_param { num_output: 2 expose_hidden: true } => has shape 1x3x3, expected 1x3x2
LSTMUnit c=2,3,4 g=1,3,16 k=1,3 > d h => bottom 0 has shape 2x3x4, expected 1xNxH
LSTMUnit c=1,3,4 g=1,3,12 k=1,3 > d h => bottom 1 has shape 1x3x12, expected 1x3x16
LSTMUnit c=1,3,4 g=1,3,16 k=3,1 > d h => bottom 2 has shape 3x1, expected 1x3
HingeLoss x=4,3 l=3 > loss => has shape 3, expected 4 values: one for each item
MultinomialLogisticLoss x=4,3 l=3 > loss => expected one label an item
SigmoidCrossEntropyLoss x=4,3 l=4 > loss => expected the same number of values
InfogainLoss x=4,3 l=4 > loss => neither infogain_loss_param source
InfogainLoss x=4,3 l=4 h=2,2 > loss => bottom 2 has shape 2x2
InfogainLoss x=4,3 l=4 > loss | infogain_loss_param { source: "/no/such" } => cannot read '/no/such'
EuclideanLoss a=2,3 b=2,2 > loss => expected the same number of values
SmoothL1Loss a=2,3 b=2,2 > loss => expected equal shapes
ContrastiveLoss a=2,3 b=2,2 y=2 > loss => expected NxC
ContrastiveLoss a=2,3,2,1 b=2,3,2,1 y=2 > loss => expected NxC
ContrastiveLoss a=2,3 b=2,3 y=3 > loss => expected 2 values: one for each pair
Reduction x=2,3,4 > y | reduction_param { axis: 3 } => axis 3 is outside
ArgMax x=2,3,4 > y | argmax_param { top_k: 13 } => top_k is 13, expected 1 to 12
ArgMax x=2,3,4 > y | argmax_param { axis: 1 top_k: 4 } => top_k is 4, expected 1 to 3
ArgMax x=2,3,4 > y | argmax_param { top_k: 0 } => top_k is 0
PReLU x=3 > y => bottom has shape 3, expected NxC...
Clip x=3 > y => missing min of clip_param
AbsVal x=3 > x => cannot run in place; name its top differently than 'x'
Exp x=3 > y | exp_param { base: 0 } => base is 0, expected a positive number, or -1 for e
Exp x=3 > y | exp_param { base: inf } => base is inf, expected a positive number
Log x=3 > y | log_param { base: -2 } => base is -2, expected a positive number
Log x=3 > y | log_param { base: 1 } => base is 1, expected a different positive number
Scale x=2,3 > y | scale_param { num_axes: 2 } => axis 1 and num_axes 2
Bias x=2,3 > y | bias_param { num_axes: -2 } => num_axes is -2, expected -1
Bias x=2,3 > y | bias_param { axis: 2 } => axis 2 is outside the 2 axes
Scale x=2,3 s=2 > y => bottom 1 has shape 2
Bias x=2,3 s=3,4 > y => bottom 1 has shape 3x4
Axpy a=2,3 x=2,3,4,5 z=2,3 > y => bottom 2 has shape 2x3
Axpy a=2,4 x=2,3,4,5 z=2,3,4,5 > y => bottom 0 has shape 2x4
Parameter > y | parameter_param { shape { dim: -1 } } => expected no negative
MVN x=1,2,3,4,5 > y => has 5 axes, expected at most 4
Normalize x=3 > y => bottom has shape 3, expected NxC...
ROIPooling x=2,3,8,9 r=2,4 > y | roi_pooling_param { pooled_h: 1 pooled_w: 1 } => expected 5 values
ROIPooling x=2,3,8 r=2,5 > y | roi_pooling_param { pooled_h: 1 pooled_w: 1 } => expected 4 axes
ROIPooling x=2,3,8,9 r=2,5 > y | roi_pooling_param { pooled_h: 1 } => missing pooled_w
PSROIPooling x=1,8,4,4 r=1,5 > y | psroi_pooling_param { spatial_scale: 1 output_dim: 2 group_size: 3 } => has 8 channels, expected output_dim x group_size^2 = 18
PSROIPooling x=1,8,4,4 r=1,5 > y | psroi_pooling_param { spatial_scale: 1 output_dim: 0 group_size: 3 } => output_dim is 0
ROIAlign x=1,8,4,4 r=1,5 > y | roi_align_param { pooled_h: 3 } => missing pooled_w
SmoothL1LossOHEM a=2,3 b=2,2 > z => expected equal shapes
SmoothL1LossOHEM a=2 b=2 > z => expected equal shapes of 2
BoxAnnotatorOHEM r=2,5 e=2 l=2 w=2,8 > a b | box_annotator_ohem_param { roi_per_img: 0 } => roi_per_img is 0
BoxAnnotatorOHEM r=2,5 e=3 l=2 w=2,8 > a b | box_annotator_ohem_param { roi_per_img: 1 } => bottom 1 has shape 3, expected 2 values
SoftmaxWithLoss a=2,3 l=2 > z | loss_param { weight_by_label_freqs: true class_weighting: 1 } => class_weighting occurs 1 times, expected 3
PRIORS { min_size: nan } => min_size is nan, expected a finite number
PRIORS { min_size: 4 aspect_ratio: inf } => aspect_ratio is inf, expected a finite number
PRIORS { min_size: 4 offset: inf } => offset is inf, expected a finite number
PRIORS { } => min_size is
PRIORS { min_size: 4 max_size: 4 } => max_size 4 is not larger
PRIORS { min_size: 4 min_size: 5 max_size: 9 } => max_size occurs 1 times, expected 2
PRIORS { min_size: 4 variance: 1 variance: 2 } => expected one or four
PRIORS { min_size: 4 step: 3 step_h: 2 } => both step and step_h/step_w
PRIORS { min_size: 4 img_h: 3 } => expected positive numbers
PRIORS { min_size: 4 aspect_ratio: -1 } => aspect_ratio is -1
Permute x=2,3 > y | permute_param { order: 1 order: 1 } => different axes
Proposal a=1,3,1,3 b=1,4,1,3 c=1,3 > ty | proposal_param { feat_stride: 16 base_size: 16 ratio: 1 scale: 1 } => bottom 0 has shape
Proposal a=1,2,1,3 b=1,4,3,1 c=1,3 > ty | proposal_param { feat_stride: 16 base_size: 16 ratio: 1 scale: 1 } => bottom 1 has shape 1x4x3x1
Proposal a=1,2,1,3 b=1,4,1,3 c=1,2 > ty | proposal_param { feat_stride: 16 base_size: 16 ratio: 1 scale: 1 } => expected height
Proposal a=1,2,1,3 b=1,4,1,3 c=1,3 > ty | proposal_param { feat_stride: 16 base_size: 16 ratio: 1 scale: 1 nms_thresh: 2 } => nms_thresh is 2
Proposal a=1,2,1,3 b=1,4,1,3 c=1,3 > ty | proposal_param { ratio: 0 scale: 1 } => expected positive numbers
Proposal a=1,2,1,3 b=1,4,1,3 c=1,3 > ty | proposal_param { feat_stride: 0 } => feat_stride is 0
AnchorTarget a=2,2,1,3 b=1,5 c=1,3 > ty tl tt ta | anchor_target_param { feat_stride: 16 base_size: 16 ratio: 1 scale: 1 } => expected 1xCxHxW: the map
AnchorTarget a=1,2,1,3 b=1,4 c=1,3 > ty tl tt ta | anchor_target_param { feat_stride: 16 base_size: 16 ratio: 1 scale: 1 } => x1, y1, x2, y2
AnchorTarget a=1,2,1,3 b=1,5 c=1,3 > ty tl tt ta | anchor_target_param { feat_stride: 16 base_size: 16 ratio: 1 scale: 1 batch_size: 0 } => batch_size is 0
AnchorTarget a=1,2,1,3 b=1,5 c=1,3 > ty tl tt ta | anchor_target_param { feat_stride: 16 base_size: 16 ratio: 1 scale: 1 positive_weight: 1 } => positive_weight is 1
ProposalTarget a=3,5 b=1,5 > ty tl tt ta tb | proposal_target_param { num_classes: 1 } => num_classes is 1
ProposalTarget a=3,5 b=1,5 > ty tl tt ta tb | proposal_target_param { num_classes: 3 batch_size: 0 } => batch_size is 0
ProposalTarget a=3,4 b=1,5 > ty tl tt ta tb | proposal_target_param { num_classes: 3 } => expected 5 values for each region
ProposalTarget a=3,5 b=1,5 > ty tl tt ta tb | proposal_target_param { num_classes: 3 bbox_std: 1 } => must occur four times
BatchReindex x=3,2 p=2,2 > y => bottom 1 has shape 2x2
Filter x=3,2 s=3,2 > y => selector has shape 3x2
Filter x=4,2 s=3 > y => bottom 'x' has shape 4x2, expected 3 items
Crop x=2,3,4 z=2,3 > y => expected the same number of axes
Crop x=2,3,4 z=2,3,4 > y | crop_param { offset: 1 } => exceed axis 2
Crop x=2,3,4 z=2,3,4 > y | crop_param { offset: 0 offset: 0 } => offset occurs 2 times
Tile x=2,3 > y => missing tiles
Tile x=2,3 > y | tile_param { tiles: 0 } => tiles is 0
ShuffleChannel x=2,3 > y | shuffle_channel_param { group: 2 } => divisor of the 3 channels
DETECTIONS { } => num_classes is missing
DETECTIONS { num_classes: 2 nms_param { nms_threshold: -1 } } => nms_threshold is -1
DETECTIONS { num_classes: 2 nms_param { eta: 0 } } => eta is 0, expected more than 0
DETECTIONS { num_classes: 2 nms_param { eta: nan } } => eta is nan
DETECTIONS { num_classes: 3 } => bottom 1 has 6 scores for each image, expected 9 for 3 prior boxes
EVALUATE { num_classes: 0 } => num_classes is 0, expected 1 to 1000000
EVALUATE { num_classes: 4294967295 } => num_classes is 4294967295, expected 1 to 1000000
EVALUATE { num_classes: 3 overlap_threshold: 0 } => overlap_threshold is 0, expected a positive number
DetectionEvaluate found=1,1,1,8 gt=1,1,3,8 > eval | detection_evaluate_param { num_classes: 3 } => bottom 0 has shape 1x1x1x8, expected 1x1xDx7
DetectionEvaluate found=1,1,6,7 gt=1,1,1,7 > eval | detection_evaluate_param { num_classes: 3 } => bottom 1 has shape 1x1x1x7, expected 1x1xGx8
MULTIBOX { } => num_classes is missing
MULTIBOX { num_classes: 4 share_location: false } => set mining_type: NONE
MULTIBOX { num_classes: 4 do_neg_mining: false } => do_neg_mining contradicts mining_type
MULTIBOX { num_classes: 4 neg_pos_ratio: 0 } => neg_pos_ratio is 0
MULTIBOX { num_classes: 4 mining_type: HARD_EXAMPLE sample_size: 0 } => sample_size is 0
MULTIBOX { num_classes: 4 background_label_id: 4 } => background_label_id is 4
MULTIBOX { num_classes: 4 map_object_to_agnostic: true } => expected 2 and 0
MULTIBOX { num_classes: 4 loc_weight: inf } => loc_weight is inf
MULTIBOX { num_classes: 5 } => bottom 1 has 56 scores for each image, expected 70 for 14 prior boxes
MULTIBOX { num_classes: 4 share_location: false mining_type: NONE } => has 56 locations
MultiBoxLoss loc=2,8 conf=2,4 prior=1,2,8 gt=1,1,3,7 > l | multibox_loss_param { num_classes: 2 } => bottom 3 has shape 1x1x3x7, expected 1x1xGx8
MultiBoxLoss loc=2,8 conf=2,4 prior=2,8 gt=1,1,3,8 > l | multibox_loss_param { num_classes: 2 } => bottom 2 has shape 2x8, expected 1x2x4P
SeLuDropout x=3 > y | selu_dropout_param { dropout_ratio: 1 } => dropout_ratio is 1
Convolutoin x=2,6,9,11 > y => unknown layer type 'Convolutoin'; did you mean 'Convolution'?
SoftmaxWithLoss x=4,6 > y => has 1 bottom, expected exactly 2
ReLU x=4,6 > y z => has 2 tops, expected exactly 1
InnerProduct x=4,6 > y | inner_product_param { num_output: 2000000000 } => weight would be 2000000000x6 = 12000000000 values, more than the 2147483647 that a blob can have
Input > y | input_param { shape { dim: 1000000000000000000 dim: 1000000000000000000 } } => top 1 would be 1000000000000000000x1000000000000000000 = 1000000000000000000000000000000000000 values, more than the 2147483647 that a blob can have
Exp x=4,6 > y | exp_param { shift: 1e30 } => base^shift overflows: shift is 1e+30
ReLU x=4,6 > => has 0 tops, expected exactly 1
DummyData x=4,6 > y => has 1 bottom, expected none
Convolution x=2,6,9,11 > y z => has 1 bottom and 2 tops, expected the same number
CONV { kernel_size: 3 } => missing num_output, expected at least 1
CONV { num_output: 3 } => missing kernel_size
Convolution x=1,1,1,1 > y | convolution_param { num_output: 1 kernel_size: 5 pad: 1 } => kernel 5x5 larger than padded input 3x3
CONV { num_output: 3 kernel_size: 3 dilation: 5 } => (11x11 with dilation 5x5) larger than
CONV { num_output: 4 kernel_size: 1 group: 4 } => bottom has 6 channels, expected a multiple of group 4
CONV { num_output: 4 kernel_size: 1 group: 3 } => num_output is 4, expected a multiple of group 3
CONV { num_output: 4 kernel_size: 1 group: 0 } => group is 0, expected at least 1
CONV { num_output: 4 kernel_size: 1 kernel_h: 3 kernel_w: 3 } => has both kernel_size and kernel_h/kernel_w
CONV { num_output: 4 kernel_h: 3 } => has only one of kernel_h and kernel_w
CONV { num_output: 4 kernel_size: 1 kernel_size: 1 kernel_size: 1 } => kernel_size occurs 3 times, expected once or 2 times
CONV { num_output: 4 kernel_size: 1 stride: 0 } => stride is 0x0, expected at least 1 on each axis
CONV { num_output: 4 kernel_size: 1 axis: 4 } => axis 4 is outside the 4 axes of a bottom of shape 2x6x9x11
Convolution x=1,2,3,3,3,3 > y | convolution_param { num_output: 1 kernel_size: 1 } => has 4 spatial axes, expected at most 3
CONV { num_output: 4 kernel_size: 1 weight_filler { type: 'xaver' } } => weight: unknown filler type 'xaver'; did you mean 'xavier'?
POOL { stride: 2 } => missing kernel_size
POOL { kernel_size: 20 } => kernel 20x20 larger than padded input 9x11
POOL { kernel_size: 2 pad: 2 } => pad 2x2 must be smaller than the kernel 2x2
POOL { kernel_size: 2 global_pooling: true } => has global_pooling and a kernel size
POOL { kernel_h: 2 } => has only kernel_h, expected both kernel_h and kernel_w
POOL { kernel_size: 2 stride: 1 stride_h: 1 stride_w: 1 } => has both stride and stride_h/stride_w
POOL { pool: STOCHASTIC kernel_size: 2 pad: 1 } => pool: STOCHASTIC allows no pad
Pooling x=4,6 > y | pooling_param { kernel_size: 1 } => has shape 4x6, expected 4 axes
Pooling x=2,6,9,11 > y m | pooling_param { pool: AVE kernel_size: 1 } => only pool: MAX has a mask
LRN x=2,6,9,11 > y | lrn_param { local_size: 4 } => local_size is 4, expected an odd number
LRN x=4,6 > y => has shape 4x6, expected 4 axes
InnerProduct x=4,6 > y => missing num_output, expected at least 1
Dropout x=4,6 > y | dropout_param { dropout_ratio: 1 } => dropout_ratio is 1, expected
SoftmaxWithLoss x=4,6 l=4,10 > loss => bottom 'l' has 10 values per item, expected 1
Accuracy x=4,6 l=5 > a => bottom 'l' of shape 5 has 5 values, expected 4
Accuracy x=4,6 l=4 > a | accuracy_param { top_k: 7 } => top_k is 7, expected 1 to 6, the number of classes
Softmax x=4,6 > y | softmax_param { axis: 2 } => axis 2 is outside the 2 axes
EuclideanLoss x=4,6 y=4,5 > z => bottoms have shapes 4x6 and 4x5
Concat x=4,6 y=5,5 > z => bottom 'y' has shape 5x5, expected 4x6 on every axis but 1
Slice x=4,6 > a b | slice_param { slice_point: 7 } => slice points [7] must ascend
Slice x=4,6 > a b | slice_param { slice_point: 1 slice_point: 2 } => has 2 slice points for 2 tops, expected 1
Slice x=4,6 > a b c d => has extent 6, expected a multiple of the 4 tops
Eltwise x=4,6 y=4,5 > z => bottom 'y' has shape 4x5, expected 4x6 as the first
Eltwise x=4 y=4 > z | eltwise_param { coeff: 1 } => has 1 coeff for 2 bottoms, expected one each
Flatten x=2,6,9,11 > y | flatten_param { axis: 2 end_axis: 1 } => end_axis 1 is before axis 2
Reshape x=4,6 > y | reshape_param { shape { dim: 5 dim: 5 } } => has 25 values, expected 24
Reshape x=4,6 > y | reshape_param { shape { dim: 5 dim: -1 } } => do not divide by 5
Input > a => input_param shape occurs 0 times, expected once
Input > a | input_param { shape { dim: 0 } } => shape is 0, expected extents of at least 1
DummyData > a b | dummy_data_param { num: 1 num: 1 num: 1 } => num occurs 3 times
Data > a | data_param { batch_size: 1 } => missing source
Data > a | data_param { source: 'db' } => missing batch_size, expected at least 1
Data > a | data_param { source: 'db' batch_size: 0 } => batch_size is 0, expected at least 1
Data > a | data_param { source: 'db' batch_size: 1 scale: 2 } => data_param has scale, which belongs in transform_param
ReLU x=4,6 > y | loss_weight: 1 loss_weight: 1 => loss_weight occurs 2 times for 1 top,
ReLU x=4,6 > y | propagate_down: true propagate_down: true => propagate_down occurs 2 times for 1 bottom,
InnerProduct x=4,6 > y | param {} param {} param {} inner_product_param { num_output: 3 } => has 3 param specs, expected at most 2: it has 2 blobs
ReLU x=4,6 > y | param {} => has 1 param spec, expected at most 0: it has 0 blobs
InnerProduct x=4,6 > y | inner_product_param { num_output: 3 } blobs { shape { dim: 1 } data: 1 } => the definition has blobs of shape 1, expected 3x6, 3
Bias x=4,6 > y | blobs { shape { dim: 2 } data: [1, 2] } => the definition has blobs of shape 2, expected 6
Bias x=4,6 > y | blobs { shape { dim: 6 } } => blob of shape (6,) has 0 values, expected 6
Filter x=4,6 s=4 > x => runs in place on 'x', whose shape it changes; give the top a different name
"""
"""A layer, as in `stack`, and a part of the sentence."""
WORDS = {
    "MULTIBOX": "MultiBoxLoss loc=3,56 conf=3,56 prior=1,2,56 gt=1,1,5,8 > loss | multibox_loss_param",
    "DETECTIONS": "DetectionOutput loc=1,12 conf=1,6 prior=1,2,12 > found | detection_output_param",
    "EVALUATE": "DetectionEvaluate found=1,1,6,7 gt=1,1,3,8 > eval | detection_evaluate_param",
    "PRIORS": "PriorBox f=1,4,2,3 i=1,3,20,30 > y | prior_box_param",
    "CONV": "Convolution x=2,6,9,11 > y | convolution_param",
    "POOL": "Pooling x=2,6,9,11 > y | pooling_param",
    "UPSAMPLE": "Upsample x=1,2,2,3 m=1,2,2,3 > y | upsample_param",
}


def cases() -> list[tuple[str, str]]:
    """The layers and sentences of the table, its words in capitals written out."""
    text = REFUSED.strip()
    for word, meaning in WORDS.items():
        text = text.replace(word, meaning)
    return [(line.split(" => ")[0], line.split(" => ")[1]) for line in text.splitlines()]


@pytest.mark.parametrize(("line", "sentence"), cases())
def test_a_refusal_is_one_sentence_with_its_place(line: str, sentence: str) -> None:
    with pytest.raises(DefinitionError) as caught:
        build(stack(line))
    said = str(caught.value)
    assert sentence in said and "\n" not in said
    assert said.startswith("net.prototxt:") and f"layer 'layer' ({line.split()[0]})" in said
    assert caught.value.line is not None

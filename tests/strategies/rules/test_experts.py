"""Products of rows with the matrices of their experts, sliced over rows, experts, contraction and columns; and the
operators that sort tokens by expert and put them back."""

import torch
from torch.nn.functional import grouped_mm

torch.manual_seed(1)
BOTH = torch.library.Library("transformers", "FRAGMENT")
if not hasattr(torch.ops.transformers, "grouped_mm_fallback"):
    BOTH.define("grouped_mm_fallback(Tensor input, Tensor weight, Tensor offs) -> Tensor")

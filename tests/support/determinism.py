"""Operations that PyTorch refuses on a GPU where only deterministic ones are allowed, found on tensors without data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

REFUSED = {
    *("bincount", "cumsum", "histc", "kthvalue", "median", "nanmedian", "put", "put_", "scatter_reduce"),
    *("_ctc_loss_backward", "_embedding_bag", "_embedding_bag_dense_backward", "grid_sampler_2d_backward"),
    *("nll_loss2d_forward", "nll_loss2d_backward", "upsample_linear1d_backward", "upsample_bilinear2d_backward"),
    *("_adaptive_avg_pool2d_backward", "adaptive_max_pool2d_backward", "reflection_pad1d_backward"),
    "scatter_reduce_",
}
"""What the documentation of torch.use_deterministic_algorithms names, as far as a language model may come near it. What
kernels refuse that stand behind other operations (products, attention) is for tests on a GPU to find."""


class OnlyDeterministic(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Raises an error at what is in REFUSED, and notes all operations."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: set[str] = set()

    def __torch_dispatch__(
        self, function: Any, types: Any, arguments: Sequence[Any] = (), named: Mapping[str, Any] | None = None
    ) -> Any:
        name = function.overloadpacket.__name__
        assert name not in REFUSED, f"{name} is not deterministic on a GPU"
        self.seen.add(name)
        return function(*arguments, **(named or {}))

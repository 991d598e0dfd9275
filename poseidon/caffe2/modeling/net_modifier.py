"""The base class of what adds operators to a net that is built."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any


class NetModifier(ABC):
    """Adds operators to a net; `modifier(net, ...)` is `modifier.modify_net(net, ...)`."""

    @abstractmethod
    def modify_net(
        self,
        net: Any,
        init_net: Any = None,
        grad_map: Any = None,
        blob_to_device: Any = None,
        modify_output_record: bool = False,
    ) -> None:
        """Modify a net.

        Args:
            net: the net.
            init_net: the net that makes its parameters.
            grad_map: the gradient of each parameter, such as `model.param_to_grad`.
            blob_to_device: the device of each blob.
            modify_output_record: whether new blobs go to the record of the net's outputs.
        """

    def __call__(self, net: Any, *args: Any, **kwargs: Any) -> None:
        self.modify_net(net, *args, **kwargs)

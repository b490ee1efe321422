"""What a run can attach to its model beside the pruner, for example a teacher: an object with state of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from platon.lab.settings import Settings
from platon.lab.tasks import Prepared


class Attachment(Protocol):
    """An object that takes part in the training through hooks of the model, and whose state checkpoints carry."""

    def state_dict(self) -> dict[str, Any]:
        """Values that JSON can hold, and under "tensors", if it has any, a dictionary of tensors."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from such a state."""
        ...

    def detach(self) -> None:
        """Remove the hooks; called when training ends. Calling it again does nothing."""
        ...


#: builds the attachments of a run: its settings, its model (before training) and its task -> name -> object
Attach = Callable[[Settings, Any, Prepared], Mapping[str, Attachment]]

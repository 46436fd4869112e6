"""What a person says who goes on with a stored run from a form."""

from typing import ClassVar

from pydantic import Field

from configs.base import Settings
from configs.storage import StoreConfig


class ResumeConfig(Settings):
    """Which run goes on, and with which of its settings changed."""

    form_first: ClassVar[tuple[str, ...]] = ("run", "steps", "settings")

    run: str = Field(
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$",
        description="Name of the run in the store; `refrain runs` lists them. All else may stay as "
        "it is.",
    )
    steps: int | None = Field(
        None, ge=1, description="RL steps of the run, those that are made counted; none: as before."
    )
    settings: tuple[str, ...] = Field(
        (),
        description="Other settings that change, as key=value: where and how fast it goes "
        "(cluster.…, tracking.…, rollout.max_sequences), what is kept (store.keep_versions), guards, "
        "evaluation, data.epochs. One that would make the run's past another is refused, with the "
        "list of those that may change.",
    )
    store: StoreConfig = Field(default_factory=StoreConfig, description="Where the run is.")

    @property
    def words(self) -> list[str]:
        """The changes as key=value."""
        return [*([] if self.steps is None else [f"steps={self.steps}"]), *self.settings]

"""The settings of a server that answers requests with a policy version (flows/serve.py)."""

from pydantic import Field, JsonValue, model_validator

from configs.base import Settings
from configs.storage import StoreConfig, TrackingConfig

VERSION = r"^(models:/[^@/\s]+@[^@/\s]+|[A-Za-z0-9][A-Za-z0-9._-]*(@\d+)?)$"
PORT = 8100
KEY_VARIABLE = "REFRAIN_SERVE_KEY"
VARIABLE = r"^[A-Z_][A-Z0-9_]*$"


class ServeConfig(Settings):
    """vLLM's OpenAI-compatible server on a policy version."""

    version: str = Field(
        pattern=VERSION, description="models:/NAME@ALIAS, RUN@VERSION, or RUN for its last version."
    )
    follow: bool = Field(
        False, description="Serve another version as soon as the alias, or RUN, has one."
    )
    look_every: float = Field(
        10.0, gt=0, description="Seconds between looks at which version that is (follow = true)."
    )
    host: str = Field("127.0.0.1", description="Address to listen at.")
    key_variable: str = Field(
        KEY_VARIABLE,
        pattern=VARIABLE,
        description="NAME of the environment variable with the key that requests have to show. "
        "Where it is not set, and host is of this machine alone, a key is made and kept in folder.",
    )
    port: int = Field(PORT, ge=1, le=65535, description="Port to listen at.")
    folder: str = Field(
        ".refrain/served", description="Where versions are written for vLLM; the newest two stay."
    )
    max_model_len: int | None = Field(
        None,
        ge=2,
        description="Longest sequence, prompt and completion together, in tokens; none: as in the "
        "run's own sampling.",
    )
    engine_args: dict[str, JsonValue] = Field(
        default_factory=dict,
        description="Further options of vllm serve by name, as {max_num_seqs: 64}.",
    )
    start_timeout: float = Field(
        600.0, gt=0, description="Longest time in which the server must answer, in seconds."
    )
    store: StoreConfig = Field(default_factory=StoreConfig, description="Where the run is.")
    tracking: TrackingConfig = Field(
        default_factory=TrackingConfig, description="MLflow, whose registry has the aliases."
    )

    @model_validator(mode="after")
    def _moves(self) -> "ServeConfig":
        fixed = "@" in self.version and not self.version.startswith("models:/")
        if self.follow and fixed:
            raise ValueError(
                f"follow = true, but version = {self.version} never moves. Set version to "
                "models:/NAME@ALIAS, or to RUN for its last version."
            )
        return self

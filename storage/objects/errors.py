"""What can go wrong with a store, by name. Every message is one sentence that names the object."""


class StoreError(RuntimeError):
    """The store refused or failed: no permission, no space, a bad answer."""


class StoreUnavailable(StoreError):
    """The store still failed after the retries: the cause may pass, so a task may be retried."""


class ObjectMissing(StoreError):
    """No object is stored under the key."""


class ObjectDamaged(StoreError):
    """An object's bytes are not those that were written, or not those that the ref names."""


class Conflict(StoreError):
    """A compare-and-swap found another value than the one expected."""

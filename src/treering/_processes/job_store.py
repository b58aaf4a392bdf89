"""Accesses the key-value store that `jax.distributed` runs in process 0 of a job."""

from collections.abc import Callable
from typing import Any

from .._threads.thread import Thread, lost_thread, start_threads
from ..errors import PeerError


class JobStore:
    """Sends requests to the store for the call `what`. All methods raise `PeerError` if it fails or does not answer.

    In process 0 (`here`) the store is in the process itself. In other processes JAX's client would wait without limit
    for a suspended process 0. Here each request ends after `timeout` seconds.
    """

    def __init__(self, client: Any, what: str, *, here: bool, timeout: float):
        self._client, self._what, self._here, self._timeout = client, what, here, timeout

    def put(self, key: str, text: str) -> None:
        self._request(lambda: self._client.key_value_set(key, text, allow_overwrite=True))

    def put_new(self, key: str, text: str) -> None:
        """Puts a value unless the key has one."""
        self._request(self._client.key_value_set, key, text, absent=("ALREADY_EXISTS", None))

    def get(self, key: str, default: Any) -> Any:
        return self._request(self._client.key_value_try_get, key, absent=("NOT_FOUND", default))

    def wait_for(self, key: str, seconds: float) -> str | None:
        """Returns the value of a key, or None if it has none after `seconds` seconds."""
        get, milliseconds = self._client.blocking_key_value_get, int(seconds * 1000)
        return self._request(get, key, milliseconds, absent=("DEADLINE_EXCEEDED", None))

    def list_values(self, directory: str) -> dict[int, str]:
        """Returns the values below a key by process."""
        found = self._request(self._client.key_value_dir_get, directory, absent=("NOT_FOUND", []))
        named = ((key.rpartition("/")[2], value) for key, value in found)
        return {int(name): value for name, value in named if name.isdigit()}

    def list_keys(self, directory: str) -> list[str]:
        """Returns the keys below a key."""
        return [key for key, _ in self._request(self._client.key_value_dir_get, directory, absent=("NOT_FOUND", []))]

    def delete(self, key: str) -> None:
        """Deletes a key, or the keys below it if it ends in a slash."""
        self._request(self._client.key_value_delete, key)

    def _request(self, ask: Callable[..., Any], *args: Any, absent: tuple[str, Any] = ("", None)) -> Any:
        """Sends a request. `absent` is a part of the error that means "no such key", and the value to return then."""
        found: list[Any] = []

        def work() -> None:
            try:
                found.append((ask(*args), None))
            except RuntimeError as error:
                found.append((None, error))

        if self._here:
            work()
        else:
            # JAX's client has no timeout for most requests. A daemon thread can be left behind in one.
            thread = Thread(target=work, name="jax-store", daemon=True)
            start_threads(thread)
            thread.join(self._timeout)
            if not found and thread.has_ended:
                raise PeerError(str(lost_thread(f"{self._what}: expected the answer of process 0")))
        if not found:
            raise PeerError(f"{self._what}: process 0 has not answered for {self._timeout:g} s")
        value, error = found[0]
        if value == "":  # No value that is put is empty.
            raise PeerError(f"{self._what}: the store of the job, in process 0, gave an empty answer, so it is broken")
        if error is None:
            return value
        if absent[0] and absent[0] in str(error):
            return absent[1]
        raise PeerError(f"{self._what}: process 0, which coordinates, cannot be reached: {error}") from error

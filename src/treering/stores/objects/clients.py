"""Makes obstore's clients for the URLs of buckets, with the credentials that other programs of the field use."""

import datetime
import functools
import os
from typing import Any

from ...errors import MismatchError, RequestError, UnsupportedError

EXTRAS = {
    "s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs", "az": "azure", "azure": "azure", "adl": "azure",
    "abfs": "azure", "abfss": "azure", "http": "http", "https": "http", "memory": "http",
}  # fmt: skip
WEB = ("http://", "https://")
_REQUEST_SECONDS = 300  # per request with data: five objects at a time need half a megabyte a second
QUICK_SECONDS = 20  # per request without data, and per renewal of a lease
_RETRIES = {
    "max_retries": 6,
    "retry_timeout": datetime.timedelta(seconds=90),
    # Google's store accepts one change of an object per second. Six of the shortest pauses are longer than that.
    "backoff": {"init_backoff": datetime.timedelta(milliseconds=300), "base": 2},
}


def make_client(root: str, seconds: int = _REQUEST_SECONDS) -> Any:
    """Returns the client for the beginning of a URL (`s3://bucket`, `https://host`), with a timeout for each request.

    Raises `UnsupportedError` if obstore is not installed, and `RequestError` if it cannot make a client for the URL.
    """
    scheme, _, place = root.partition("://")
    try:
        from obstore import store
        from obstore.exceptions import BaseError
    except ImportError:
        raise UnsupportedError(
            f"{root}: reading and writing such URLs needs obstore: pip install 'treering[{EXTRAS[scheme]}]'"
        ) from None
    limits = {"timeout": f"{seconds}s", "connect_timeout": "10s"}
    options: dict[str, Any] = {"client_options": limits, "retry_config": _RETRIES}
    if scheme == "memory":
        return _in_memory(place)
    try:
        if scheme in ("http", "https"):
            options["client_options"]["allow_http"] = scheme == "http"
            return store.HTTPStore(root, **options)
        if scheme in ("s3", "s3a"):
            return _s3(store, place, options)
        return store.from_url(f"gs://{place}" if scheme == "gcs" else root, **options)
    except BaseError as error:
        raise RequestError(
            f"{root}: no client can be made for it: {brief(error)}; check the URL, and the environment variables with "
            "the account and the credentials"
        ) from error


@functools.cache
def _in_memory(name: str) -> Any:
    """Returns the memory store of that name, which lives as long as the process."""
    from obstore.store import MemoryStore

    return MemoryStore()


def _s3(store: Any, bucket: str, options: dict[str, Any]) -> Any:
    """Returns a client for S3, or for the server at `AWS_ENDPOINT_URL` that speaks its protocol.

    Over TLS, payloads are not signed: checksums protect them.
    """
    if "AWS_ACCESS_KEY_ID" not in os.environ and _has_profile():
        options |= _profile_options(bucket)
    named = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")
    endpoint = next(filter(None, map(os.environ.get, named)), options.get("endpoint", ""))
    if endpoint:
        options["endpoint"] = endpoint
    if endpoint.startswith("http://"):
        options["client_options"]["allow_http"] = True
    else:
        options["unsigned_payload"] = True
    return store.S3Store(bucket, **options)


def _has_profile() -> bool:
    named = ("AWS_PROFILE", "AWS_SHARED_CREDENTIALS_FILE", "AWS_CONFIG_FILE")
    usual = ("~/.aws/credentials", "~/.aws/config")
    return any(name in os.environ for name in named) or any(map(os.path.exists, map(os.path.expanduser, usual)))


def _profile_options(bucket: str) -> dict[str, Any]:
    try:
        import boto3
        from obstore.auth.boto3 import Boto3CredentialProvider
    except ImportError:
        raise UnsupportedError(
            f"s3://{bucket}: the credentials are in an AWS profile, which boto3 reads: pip install 'treering[s3]'"
        ) from None
    session = boto3.Session()
    found: dict[str, Any] = {"credential_provider": Boto3CredentialProvider(session=session)}
    if session.region_name:
        found["region"] = session.region_name
    endpoint = session.client("s3", region_name=session.region_name or "us-east-1").meta.endpoint_url
    if "amazonaws.com" not in endpoint:  # the profile names an endpoint
        found["endpoint"] = endpoint
    return found


def brief(error: Exception) -> str:
    """Returns the first 300 characters of an error, without the source that obstore adds."""
    text = str(error).partition("\n\nDebug source")[0]
    return " ".join(text.split())[:300]


def url_of(client: Any) -> str:
    """Returns the URL of a store object of obstore. Raises `MismatchError` for one that has none."""
    kind = type(client).__name__
    prefix = f"/{client.prefix}" if getattr(client, "prefix", None) else ""
    config = getattr(client, "config", {})
    if kind == "S3Store":
        return f"s3://{config['bucket']}{prefix}"
    if kind == "GCSStore":
        return f"gs://{config['bucket']}{prefix}"
    if kind == "AzureStore":
        return f"az://{config['container_name']}{prefix}"
    if kind == "HTTPStore":
        return client.url.rstrip("/")
    if kind == "MemoryStore":
        return f"memory://{id(client):x}"
    raise MismatchError(f"expected a path, a URL or a store object of obstore for a bucket, found a {kind}")

"""Which release this is."""

from importlib.metadata import PackageNotFoundError, version


def package_version() -> str:
    try:
        return version("lockstep-decode")
    except PackageNotFoundError:
        return "unknown"

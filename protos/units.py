"""Human-readable sizes and counts; bytes in powers of ten."""

_BYTES = ((10**12, "TB"), (10**9, "GB"), (10**6, "MB"), (10**3, "kB"))
_COUNTS = ((10**9, "B"), (10**6, "M"), (10**3, "K"))


def split_size(num_bytes: int) -> tuple[str, str]:
    """Number and unit: `("1.50", "GB")`."""
    for factor, unit in _BYTES:
        if num_bytes >= factor:
            return f"{num_bytes / factor:.2f}", unit
    return str(num_bytes), "bytes"


def size(num_bytes: int) -> str:
    """`1.50 GB`"""
    return " ".join(split_size(num_bytes))


def count(number: int) -> str:
    """`7.3M`"""
    for factor, unit in _COUNTS:
        if number >= factor:
            return f"{number / factor:.1f}{unit}"
    return str(number)

"""How the bits of wrong data are shown."""


def hexadecimal(value: int, nbytes: int) -> str:
    """The bits of a whole number of so many bytes, be it negative: "0x3f80"."""
    return f"0x{value & (1 << 8 * nbytes) - 1:0{2 * nbytes}x}"

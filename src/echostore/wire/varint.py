"""LEB128, the variable-length numbers of protobuf and CAR, for the places where bytes are put together by hand."""


def varint(number: int) -> bytes:
    """A number that is not negative, in the fewest bytes: 7 bits each, the lowest first."""
    encoded = bytearray()
    while number > 0x7F:
        encoded.append(number & 0x7F | 0x80)
        number >>= 7
    encoded.append(number)
    return bytes(encoded)

import pytest

from quire.service.addresses import check_address


@pytest.mark.parametrize(
    "address",
    ["127.0.0.1:0", "localhost:65535", "a-b.c:1", "[::1]:50051", "unix:/a/b.sock", "unix:///a b"],
)
def test_a_valid_address_is_unchanged(address: str) -> None:
    assert check_address(address) == address


@pytest.mark.parametrize(
    "address",
    [
        *("", "127.0.0.1", "127.0.0.1:", ":50051", "localhost:65536", "localhost:99999"),
        *("a:b", "a:-1", "a b:1", "::1:50051", "[zz]:1", "[127.0.0.1]:1", "unix:", "unix:a.sock"),
        *("http://a:1", "a:1/b", "a:1\n"),
    ],
)
def test_an_invalid_address_is_refused(address: str) -> None:
    with pytest.raises(ValueError, match=r".+"):
        check_address(address)

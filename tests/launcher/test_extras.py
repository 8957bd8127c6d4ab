import pytest

from quire.launcher.errors import LaunchError
from quire.launcher.extras import check_installed


def test_nothing_is_missing_here():
    check_installed()


def test_a_missing_package_is_named_with_its_extra():
    with pytest.raises(LaunchError, match=r"needs no_such_thing: pip install 'quire\[worker\]'"):
        check_installed({"gateway": "grpc", "worker": "no_such_thing"})


def test_all_extras_at_once():
    with pytest.raises(LaunchError, match=r"pip install 'quire\[all\]'"):
        check_installed({"gateway": "no_such_thing", "worker": "nor_such_thing"})

import pytest

from quire.launcher.errors import LaunchError
from quire.launcher.services import check_installed


def test_no_package_is_missing():
    check_installed()


def test_a_missing_package_is_named_with_its_extra():
    with pytest.raises(LaunchError, match=r"needs no_such_thing: pip install 'quire\[worker\]'"):
        check_installed({"gateway": "grpc", "worker": "no_such_thing"})


def test_if_all_packages_are_missing_the_extra_is_all():
    with pytest.raises(LaunchError, match=r"pip install 'quire\[all\]'"):
        check_installed({"gateway": "no_such_thing", "worker": "nor_such_thing"})

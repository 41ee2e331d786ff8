"""Which torch the collectives, and so `Run`, take."""

import pytest

from argosy.collective._torch import check_version
from argosy.core import ConfigError


def test_a_torch_that_is_too_old_is_refused_with_a_hint():
    for old in ("2.14.1+cpu", "2.9.0", "1.13.1"):
        with pytest.raises(ConfigError, match="this torch is too old") as caught:
            check_version(old)
        assert str(caught.value).endswith(f": {old}")
        assert "install torch 2.15 or newer" in caught.value.hint
    for new in ("2.15.0+cu132", "2.16.0a0+git1", "3.0"):
        check_version(new)

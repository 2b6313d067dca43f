"""What is refused of a cluster before Ray is started, and of a worker that holds other models."""

from dataclasses import replace
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest

from evalgate.core import SourceInfo
from evalgate.errors import MismatchError, UsageError
from evalgate.measure.checks import check_cluster
from evalgate.measure.run import RunRequest
from evalgate.server.cluster import Cluster, check_alike
from tests.evalgate.sample_run import source


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray, as far as a check asks."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())


@pytest.mark.parametrize(
    ("cluster", "said"),
    [
        (Cluster("local", workers=0), "give at least 1"),
        (Cluster("local", cpus=0), "--num-cpus 0 is no share"),
        (Cluster("local", cpus=float("nan")), "--num-cpus nan is no share"),
        (Cluster("local", gpus=-1), "--num-gpus -1 cannot be given"),
        (Cluster("local", gpus=1.5), "--num-gpus 1.5 cannot be given"),
        (Cluster(" "), "--ray has no address"),
        (Cluster("ray://head:10001"), "run the command on a machine of the cluster"),
    ],
)
def test_a_cluster_that_cannot_be_is_refused(installed: None, cluster: Cluster, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        cluster.check()


def test_without_ray_the_install_line_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    real = find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "ray" else real(name))
    with pytest.raises(UsageError, match=r"pip install 'evalgate-lm\[ray\]'"):
        Cluster("local").check()


def test_options_of_a_cluster_need_one(installed: None) -> None:
    with pytest.raises(UsageError, match=r"--workers, --num-gpus says .* add --ray local"):
        check_cluster(RunRequest.of("kl", "demo", ["demo@int8"], workers=2, num_gpus=1.0))
    with pytest.raises(UsageError, match=r"http://host/v1 is asked over HTTP: leave out --ray"):
        check_cluster(RunRequest.of("kl", "demo", ["http://host/v1"], ray="local"))
    check_cluster(RunRequest.of("kl", "demo", ["demo@int8"], ray="local", workers=2))


def test_a_worker_with_other_models_is_refused() -> None:
    info = SourceInfo(**source("demo").model_dump(exclude={"layers"}))
    info = replace(info, load_seconds=2.5)  # differs from load to load
    there: Any = SimpleNamespace(sources=lambda specs: {"demo": info}, versions=lambda: {"torch": "2"})
    check_alike(
        there,
        {"demo": replace(info, noise_floor=None, kl_floor=None, load_seconds=None)},
        {"torch": "2", "evalgate": "1"},
    )
    with pytest.raises(MismatchError, match=r"another weights hash of demo .* same packages, files and devices"):
        check_alike(
            there, {"demo": replace(info, noise_floor=None, kl_floor=None, load_seconds=None, weights_hash="other")}, {}
        )
    with pytest.raises(MismatchError, match=r"another version of torch .*\(2 and 3\)"):
        check_alike(there, {}, {"torch": "3"})

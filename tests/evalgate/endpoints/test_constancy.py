"""What replies name as their model, and what an answer that is asked again may change."""

import orjson
import pytest

from evalgate.core import Window
from evalgate.dialects.base import PositionScore, Reply, Score, WindowScores
from evalgate.endpoints.answers import decode, encode
from evalgate.endpoints.constancy import Named, Served, check_named, difference, few_positions
from evalgate.errors import EndpointError


def reply(**body):
    return Reply(200, {}, orjson.dumps(body))


def test_names_are_compared_path_by_path():
    served = Served("http://x")
    served.read("/v1/completions", reply(model="m", system_fingerprint=None))
    served.read("/completion", reply(model="m.gguf"))
    served.read("/v1/completions", reply(model="m", system_fingerprint="fp"))  # only said now
    served.read("/v1/completions", reply(choices=[]))  # says nothing
    served.read("/v1/completions", Reply(200, {}, b'{"model": "cut'))
    assert served.named == {Named("/v1/completions", "m", "fp"), Named("/completion", "m.gguf", "")}
    with pytest.raises(EndpointError, match=r"answered as 'm' \(system_fingerprint fp\) before and answers as 'n' now"):
        served.read("/v1/completions", reply(model="n"))


def test_names_of_kept_answers():
    kept, now = [Named("/p", "m", "a")], [Named("/p", "m", "b")]
    check_named("spec", kept, [Named("/p", "m", ""), Named("/q", "z", "z")])
    check_named("spec", kept, [Named("/q", "z", "")])  # nothing known yet
    check_named("spec", kept, [*now, Named("/p", "m", "a")])  # one of several URLs
    with pytest.raises(EndpointError, match=r"spec answered as 'm'.*--no-resume"):
        check_named("spec", kept, now)


def scores(*values):
    rows = [
        PositionScore(i, Score(7, v, v), None, 1, None, (3,), (v / 2,), (), False, (), 0.0, ())
        for i, v in enumerate(values, 1)
    ]
    return WindowScores(0, "d", 1, tuple(rows), False)


def test_the_mean_change():
    assert difference(scores(-1.0, -2.0), scores(-1.0, -2.0)) == 0.0
    assert difference(scores(-1.0, -2.0), scores(-1.5, -2.0)) == pytest.approx((0.5 + 0.25) / 4)
    assert difference(scores(-1.0, -2.0), scores(-1.5)) == pytest.approx((0.5 + 0.25) / 2)


def test_few_positions_are_the_first_of_a_window():
    window = Window(0, "d", "x", tuple(range(20)), 1, 20, (1,) * 20)
    assert few_positions(window, 3).positions == (1, 2, 3)
    assert few_positions(window, 19) is window
    masked = Window(0, "d", "x", tuple(range(6)), 1, 6, (1,) * 6, mask=(True, False, True, False, True))
    assert few_positions(masked, 2).positions == (1, 3)


def test_names_are_kept_with_the_answer():
    table = encode(scores(-1.0), {Named("/p", "m", "a")})
    assert decode(table) == scores(-1.0)

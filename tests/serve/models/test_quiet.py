from __future__ import annotations

import logging
import os
import sys

import pytest
from tqdm.auto import tqdm

from serve.models.quiet import quiet


def test_nothing_reaches_stdout_and_everything_is_put_back(
    capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(ValueError, match="broken"), quiet():
        print("python")
        os.write(1, b"from C\n")
        list(tqdm(range(3)))
        logging.getLogger("transformers").warning("noise")
        logging.getLogger("torchao").warning("noise")
        raise ValueError("broken")
    print("after")
    sys.stdout.flush()
    assert list(tqdm(range(2), file=sys.stderr)) == [0, 1]
    captured = capfd.readouterr()
    assert captured.out == "after\n"
    assert "python" in captured.err and "from C" in captured.err and "noise" not in captured.err + caplog.text
    assert "3/3" not in captured.err and "2/2" in captured.err
    logging.getLogger("elsewhere").warning("heard")
    assert "heard" in capfd.readouterr().err or "heard" in caplog.text

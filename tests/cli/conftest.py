"""Calls the command as from a shell, but in this process."""

import json
from typing import Any, NamedTuple

import pytest

from treering._cli.main import main


class Result(NamedTuple):
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


@pytest.fixture
def treering(capsys: pytest.CaptureFixture[str]) -> Any:
    """Returns a function that runs the command with arguments, and returns its exit code and output."""

    def call(*arguments: object) -> Result:
        capsys.readouterr()
        code = main([str(one) for one in arguments])
        return Result(code, *capsys.readouterr())

    return call

"""Completion scripts know every command, and a real bash completes with them."""

import subprocess

import pytest

from headroom.commands.main import main, make_parser
from headroom.shell.completion import SHELLS, completion_script


def complete(line: str) -> list[str]:
    """The words that bash offers for the last word of the line."""
    words = line.split(" ")
    script = completion_script(make_parser(with_optimizer=False), dialect="bash")
    typed = " ".join(repr(word) for word in words)
    ask = f"{script}\nCOMP_WORDS=({typed}); COMP_CWORD={len(words) - 1}; _headroom; echo ${{COMPREPLY[@]}}"
    found = subprocess.run(["bash", "-c", ask], capture_output=True, text=True, check=True, timeout=30)
    return found.stdout.split()


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("headroom jo", ["jobs"]),
        ("headroom jobs st", ["stop"]),
        ("headroom models li", ["list"]),
        ("headroom jobs stop my-run --d", ["--discard"]),
    ],
)
def test_bash_completes_nouns_verbs_and_options(line: str, offered: list[str]) -> None:
    assert complete(line) == offered


@pytest.mark.parametrize("shell", SHELLS)
def test_each_shell_has_a_script_with_every_verb(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert all(word in script for word in ("submit", "follow", "restore", "plan"))


def test_the_same_commands_without_the_noun_work_and_are_not_listed(capsys: pytest.CaptureFixture[str]) -> None:
    parser = make_parser(with_optimizer=False)
    assert parser.parse_args(["follow", "my-run"]).run is parser.parse_args(["jobs", "follow", "my-run"]).run
    assert parser.parse_args(["cancel", "my-run", "--keep"]).run is parser.parse_args(["jobs", "stop", "my-run"]).run
    assert "\n    follow " not in parser.format_help()


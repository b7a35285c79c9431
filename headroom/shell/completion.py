"""Scripts that complete ``headroom`` in a shell, made from the parser itself, so that they know every command and option.

``source <(headroom completion bash)``; zsh reads the same script through ``bashcompinit``.
"""

import argparse
from collections.abc import Iterator
from typing import Final

SHELLS: Final = ("bash", "zsh", "fish")
_BASH: Final = """_headroom() {
  local cur="${COMP_WORDS[COMP_CWORD]}" path="headroom" word words=""
  for word in "${COMP_WORDS[@]:1:COMP_CWORD-1}"; do
    case "$word" in -*) ;; *) path="$path $word" ;; esac
  done
  while :; do
    case "$path" in
%s
      *) path="${path%% *}"; continue ;;
    esac
    break
  done
  COMPREPLY=($(compgen -W "$words" -- "$cur"))
}
complete -o default -F _headroom headroom
"""


def add_completion(
    commands: "argparse._SubParsersAction[argparse.ArgumentParser]", parser: argparse.ArgumentParser
) -> None:
    command = commands.add_parser("completion", help="print a script that completes commands in a shell")
    command.add_argument("shell", choices=SHELLS, help="the shell that reads the script")
    command.set_defaults(run=lambda options: print(completion_script(parser, dialect=options.shell), end=""))


def completion_script(parser: argparse.ArgumentParser, *, dialect: str) -> str:
    """The whole script, ending in a newline."""
    if dialect == "fish":
        return "".join(f"{line}\n" for line in _fish_lines(parser))
    cases = "\n".join(f'      "{path}") words="{" ".join(words)}" ;;' for path, words in _words(parser, "headroom"))
    prelude = "autoload -U +X bashcompinit && bashcompinit\n" if dialect == "zsh" else ""
    return prelude + _BASH % cases


def _words(parser: argparse.ArgumentParser, path: str) -> Iterator[tuple[str, list[str]]]:
    """Commands and options after each path, such as ``headroom jobs``."""
    options = [option for action in parser._actions for option in action.option_strings if option.startswith("--")]
    choices = [str(each) for action in parser._actions if not action.option_strings for each in _listed(action)]
    yield path, [*choices, *options]
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, below in action.choices.items():
                yield from _words(below, f"{path} {name}")


def _listed(action: argparse.Action) -> list[str]:
    """Names that the help lists: of commands those with a help text."""
    if isinstance(action, argparse._SubParsersAction):
        return [choice.dest for choice in action._choices_actions]
    return [str(each) for each in action.choices or ()]


def _fish_lines(parser: argparse.ArgumentParser) -> Iterator[str]:
    for path, words in _words(parser, "headroom"):
        _, *commands = path.split()
        seen = " && ".join(f"__fish_seen_subcommand_from {name}" for name in commands) or "__fish_use_subcommand"
        plain = [word for word in words if not word.startswith("--")]
        if plain:
            yield f"complete -c headroom -f -n '{seen}' -a '{' '.join(plain)}'"
        for option in words[len(plain) :]:
            yield f"complete -c headroom -n '{seen}' -l {option.removeprefix('--')}"

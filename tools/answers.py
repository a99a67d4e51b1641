"Writes papers/answers.json, the first answers of `fedrepro tables`, `methods`, `datasets`, `scoreboard` and `claims`"

import json

from fedrepro.cli.app import SHIPPED, made_from
from fedrepro.cli.look_up import first_answers
from fedrepro.core.files import write_atomic


def main():
    "Computes them anew, and says from what: the digest that must fit when they are read"
    found = {"made_from": made_from(), "answers": first_answers()}
    text = json.dumps(found, indent=1, ensure_ascii=False, allow_nan=False)
    write_atomic(SHIPPED, f"{text}\n".encode())


if __name__ == "__main__":
    main()

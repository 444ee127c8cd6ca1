"""``python -Pm rank_stub``: a rank that does at once what its request says, without PyTorch."""

import json
import os
import signal
import time


def main() -> None:
    rank = os.environ["RANK"]
    for word in json.loads(os.pread(0, 1 << 20, 0))[rank]:
        if word == "wait":
            time.sleep(600)
        elif word == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif word == "raise":
            raise ValueError("a bug")
        elif isinstance(word, float):
            time.sleep(word)
        else:
            print(json.dumps(word), flush=True)


if __name__ == "__main__":
    main()

"""A terminal for tests: what a program writes on one of a given width, and Ctrl-C typed there."""

import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import termios
import time


def on_a_terminal(words, environment, columns=80, interrupt=lambda seen: False):
    """Run a command as the foreground job of a terminal, for at most 150 seconds.

    Ctrl-C is typed once ``interrupt`` returns true for what was written so far. Returns what was
    written, as text without colours, and the exit code.
    """
    leader, follower = pty.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    started = subprocess.Popen(
        words,
        env={**environment, "TERM": "xterm"},
        stdin=follower,
        stdout=follower,
        stderr=follower,
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    )
    os.close(follower)
    seen = b""
    typed = False
    until = time.monotonic() + 150
    try:
        while time.monotonic() < until:
            if not typed and interrupt(_plain(seen)):
                os.write(leader, b"\x03")
                typed = True
            if select.select([leader], [], [], 0.02)[0]:
                seen += os.read(leader, 65536)
    except OSError:  # the last process that had the terminal is gone
        pass
    finally:
        if time.monotonic() >= until:
            started.kill()
        os.close(leader)
    return _plain(seen), started.wait()


def _plain(seen):
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", seen.decode(errors="replace"))
    return text.replace("\r\n", "\n")

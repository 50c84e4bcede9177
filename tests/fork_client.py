"""``python -I -S fork_client.py ADDRESS [-W ACTION] -m MODULE ...`` (or ``-c CODE``): Python, in a fork of the server.

The fork (``tests/forks.py``) has this process's streams, directory and variables. Each ends when the other one does.
"""

import json
import os
import socket
import sys

with socket.socket(socket.AF_UNIX) as connection:
    connection.connect(sys.argv[1])
    asked = json.dumps({"argv": sys.argv[2:], "cwd": os.getcwd(), "environ": dict(os.environ)}).encode()  # noqa: PTH109
    socket.send_fds(connection, [len(asked).to_bytes(8, "little")], [0, 1, 2])
    connection.sendall(asked)
    code = int.from_bytes(connection.recv(4), "little", signed=True)
if code < 0:
    os.kill(os.getpid(), -code)
os._exit(code)

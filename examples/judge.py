"""A service that four ranks use: an HTTP server of its own, started beside the mesh and awaited until it is ready.

    python examples/judge.py

Takes two seconds. Expect four scores, and four more after the service was killed and replaced.
"""

import json
import os
import signal
import socket
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
from urllib.request import urlopen

import argosy


class Judge(BaseHTTPRequestHandler):
    """Scores an answer by its length; stands for any program that listens: a model server, a database."""

    def do_POST(self) -> None:
        answer = self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps({"score": len(answer), "pid": os.getpid()}).encode())


class Player:
    def play(self, round_: int) -> dict[str, int]:
        """Find the service by its name, and have an answer judged."""
        judge = argosy.connect().find("judge")
        answer = b"x" * (10 * round_ + argosy.here().rank.index)
        with urlopen(f"http://{judge.host}:{judge.port}", data=answer, timeout=10) as reply:
            return json.load(reply)


def main() -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    with argosy.local() as cluster:
        mesh = cluster.mesh(ranks=4)
        judge = mesh.service("judge", [sys.executable, __file__, str(port)], ready=argosy.Tcp(port))
        players = mesh.spawn(Player)
        first = players.play(1).gather()
        print("scores", [each["score"] for each in first])
        os.kill(first[0]["pid"], signal.SIGKILL)
        print("service:", judge.events.wait("replaced"))
        judge.wait_ready()
        print("scores", [each["score"] for each in players.play(2).gather()])


if __name__ == "__main__":
    if sys.argv[1:]:
        HTTPServer(("127.0.0.1", int(sys.argv[1])), Judge).serve_forever()
    else:
        main()

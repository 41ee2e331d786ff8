"""A web server runs as a service with a readiness check. Four ranks find it by its name and use it.

    python examples/service.py

Takes two seconds. Expect "[200, 200, 200, 200]".
"""

import socket
import sys
import urllib.request

import argosy


class Client:
    def fetch(self) -> int:
        judge = argosy.connect().find("judge")
        with urllib.request.urlopen(f"http://{judge.host}:{judge.port}/", timeout=10) as answer:
            return answer.status


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return probe.getsockname()[1]


def main() -> None:
    port = free_port()
    with argosy.local() as cluster:
        mesh = cluster.mesh(ranks=4)
        server = [sys.executable, "-m", "http.server", "--bind", "127.0.0.1", str(port)]
        mesh.service("judge", server, ready=argosy.Tcp(port), health_s=5.0)
        print(mesh.spawn(Client).fetch().gather())


if __name__ == "__main__":
    main()

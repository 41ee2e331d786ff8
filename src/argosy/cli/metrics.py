"""`argosy metrics`: living runs for Prometheus."""

import click


@click.command(short_help="Show living runs to Prometheus.")
@click.option("--listen", metavar="[HOST:]PORT", help="Serve http://HOST:PORT/metrics until Ctrl-C.")
@click.option("--json", "as_json", is_flag=True, help="Machine-readable.")
def command(listen: str | None, as_json: bool) -> None:
    """Print what the agent knows of living runs in Prometheus' text format, as quantiles over ranks.

    With --listen it answers Prometheus, by default on 127.0.0.1 alone: anyone who reaches the port can read.
    """
    from argosy.cli.tables import print_json
    from argosy.insight import MetricsEndpoint, metric_samples, metrics_text

    if as_json:
        print_json(metric_samples())
        return
    if listen is None:
        print(metrics_text(), end="")
        return
    host, _, port = listen.rpartition(":")
    if not port.isdigit() or int(port) > 65535:
        raise click.UsageError(f"not a port: {listen}")
    with MetricsEndpoint(host or "127.0.0.1", int(port)) as endpoint:
        print(f"http://{endpoint.server_address[0]}:{endpoint.server_address[1]}/metrics", flush=True)
        endpoint.serve_forever()

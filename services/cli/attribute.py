"""`attribute`: where the difference between sampler and trainer of the running job comes from."""

from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from services.cli.run import run
from shared.http import HttpClient

LOCAL_TRAINER = "http://127.0.0.1:8700"


def attribute(
    trainer: Annotated[
        str, typer.Option(envvar="TANDEM_TRAINER", help="Address of the trainer.", metavar="URL")
    ] = LOCAL_TRAINER,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for machines.")] = False,
    deadline_s: Annotated[float, typer.Option(min=1)] = 300.0,
) -> None:
    """Split |Δ log p| of the last trained step by source, under the weights held now."""

    async def command() -> int:
        async with HttpClient() as http:
            url = f"{trainer.rstrip('/')}/v1/attribution"
            found = await http.post(url, timeout_s=deadline_s)
        console = Console()
        if as_json:
            console.print_json(data=found)
            return 0
        whole = found["whole"]
        ranked = sorted(found["parts"].items(), key=lambda item: -item[1])
        first = f", {ranked[0][1] / whole:.0%} of it {ranked[0][0]}" if whole else ""
        console.print(
            f"step {found['step']} under version {found['policy_version']}: mean |Δ log p| "
            f"{whole:.3g} of {found['num_tokens']} tokens{first}",
            highlight=False,
            soft_wrap=True,
        )
        table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
        for name, part in ranked:
            share = f"{part / whole:.1%}" if whole else ""
            table.add_row(name, f"{part:.3g}", share)
        console.print(table)
        return 0

    run(command())

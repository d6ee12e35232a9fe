"""`meshwright weigh`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ._console import JsonFlag, complete_config, phases, print_json, say_readings, show, write_json

EXIT_DOES_NOT_FIT = 3

Config = Annotated[
    str,
    typer.Argument(
        metavar="CONFIG",
        help="A preset, a TOML file, the folder of a run, or package.module:function.",
        show_default=False,
        autocompletion=complete_config,
    ),
]
LayoutOption = Annotated[
    str | None,
    typer.Option("--layout", help="Mesh axes, outermost first: fsdp=64,tensor=8; one size may be -1."),
]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Override one key: model.num_layers=12. Repeatable."),
]
VerboseOption = Annotated[bool, typer.Option("--verbose", "-v", help="Print every table, not one screen.")]
TokensOption = Annotated[
    str | None,
    typer.Option(
        "--tokens",
        metavar="COUNT",
        help="Tokens of the whole run, 15B: adds its hours and device-hours.",
        show_default="the config's steps",
    ),
]
PriceOption = Annotated[
    str | None,
    typer.Option("--price", metavar="PRICE", help="Of one device-hour, 1.80: adds the cost of the run."),
]
TraceOption = Annotated[
    Path | None, typer.Option("--trace", metavar="FILE", help="Write the predicted step for ui.perfetto.dev.")
]


def weigh(
    config: Config,
    on: Annotated[
        str,
        typer.Option("--on", metavar="FLEET", help="64xH100, 16x4xA100-80GB, v5p-512, 8xCPU, or local."),
    ],
    layout: LayoutOption = None,
    overrides: SetOption = None,
    as_json: JsonFlag = False,
    verbose: VerboseOption = False,
    tokens: TokensOption = None,
    price: PriceOption = None,
    check: Annotated[bool, typer.Option("--check", help="Exit with status 3 if it does not fit.")] = False,
    simulate: Annotated[
        bool,
        typer.Option("--simulate", help="Let the CPU's compiler stand in for the target's; marked."),
    ] = False,
    html: Annotated[
        Path | None, typer.Option("--html", metavar="FILE", help="Write the account as a page with pictures.")
    ] = None,
    trace: TraceOption = None,
    explains: Annotated[
        bool, typer.Option("--explain", help="Compile each change that would help, with saving and price.")
    ] = False,
) -> None:
    """Memory, FLOPs, traffic and time of one training step on a fleet that need not be there."""
    from meshwright import api
    from meshwright._explain import explain

    say_readings(config, on, layout)
    with phases(f"weighing {config} on {on}") as on_phase:
        weighing = api.weigh(
            config,
            on=on,
            layout=layout,
            overrides=overrides or (),
            simulate=simulate,
            tokens=tokens,
            price_per_device_hour=price,
            on_phase=on_phase,
        )
        changes = explain(weighing, on_phase=on_phase) if explains else None
    if html is not None:
        from meshwright.report import write_weighing

        write_weighing(html, weighing.to_dict())
    if trace is not None:
        write_json(trace, weighing.trace())
    if as_json:
        told = {} if changes is None else {"changes": [change.to_dict() for change in changes]}
        print_json({**weighing.to_dict(), **told})
    else:
        from meshwright.report import changes_text, screen_text, weighing_text

        show(weighing_text(weighing) if verbose else screen_text(weighing))
        if changes is not None:
            show(changes_text(changes))
    if check and weighing.fits is False:
        raise typer.Exit(EXIT_DOES_NOT_FIT)

"""How the report looks: plain CSS, light and dark, with the fonts that are there."""

COLOURS = ("#3b7dd8", "#e07b39", "#3a9e6f", "#b455c0", "#c9a227", "#d64562", "#4bb3c4", "#8a6d5a", "#7b7fd4", "#6a9a2d")

CSS = """
:root { color-scheme: light dark; --ink: #1d2430; --paper: #fff; --soft: #f2f4f8; --line: #d5dae3; --dim: #667084;
  --hot: #d64562 }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e4e8f0; --paper: #14171d; --soft: #1e232c; --line: #333b49; --dim: #97a1b3; --hot: #ff6b84 }
}
* { box-sizing: border-box }
body { margin: 0 auto; max-width: 1400px; padding: 28px 24px 60px; background: var(--paper); color: var(--ink);
  font: 15px/1.5 system-ui, sans-serif }
h1 { font-size: 24px; margin: 0 } h2 { font-size: 18px; margin: 34px 0 10px }
h3 { font-size: 15px; margin: 18px 0 6px }
p { margin: 6px 0 } .note { color: var(--dim); font-size: 13px }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(150px, 1fr)); gap: 10px; margin: 18px 0 }
.tile { background: var(--soft); border-radius: 8px; padding: 10px 14px }
.tile b { display: block; font-size: 20px; font-variant-numeric: tabular-nums }
.tile span { color: var(--dim); font-size: 13px }
.legend { list-style: none; display: flex; flex-wrap: wrap; gap: 2px 18px; padding: 0; margin: 6px 0;
  font-size: 13px }
.swatch { display: inline-block; width: 11px; height: 11px; border-radius: 2px; margin-right: 6px }
.bar svg { width: 100%; max-width: 960px; height: auto }
.wide { overflow-x: auto } .picture { max-width: none; display: block }
table { border-collapse: collapse; font-size: 13px; width: 100% }
th, td { text-align: left; padding: 4px 8px; border-bottom: 1px solid var(--line); white-space: nowrap }
th { color: var(--dim); font-weight: 600 }
td.number, th.number { text-align: right; font-variant-numeric: tabular-nums }
tr.kind td { background: var(--soft); font-weight: 600 } td.name { padding-left: 26px }
code { font: 12.5px ui-monospace, monospace } td code { white-space: normal }
details { border: 1px solid var(--line); border-radius: 8px; padding: 8px 14px; margin: 8px 0 }
summary { cursor: pointer }
svg text { fill: var(--ink); font: 12px system-ui, sans-serif }
svg text.rank { fill: #fff; text-anchor: middle; font-size: 10px }
rect.holds { fill: var(--soft); stroke: var(--ink) } rect.plain { fill: var(--paper); stroke: var(--line) }
rect.rank { fill: #3b7dd8 }
path { fill: none }
path.edge { stroke: var(--line); stroke-width: 1.5 } path.sent { stroke: var(--hot); stroke-width: 3 }

"""

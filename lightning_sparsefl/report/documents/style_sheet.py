"""Style sheet of the page, for light and dark."""

from __future__ import annotations

STYLE = """\
:root {
  color-scheme: light dark;
  --page: #ffffff; --ink: #1c2530; --soft: #5b6673; --line: #d8dde3;
  --card: #f7f8fa; --note: #fff4dc; --note-ink: #5c4100;
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #14181d; --ink: #e4e8ec; --soft: #9aa5b1; --line: #343b44;
    --card: #1b2027; --note: #3a2f14; --note-ink: #f3dfae;
  }
  figure img { filter: invert(0.93) hue-rotate(180deg); }
}
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink); font: 15px/1.5 system-ui, sans-serif; }
main { max-width: 1240px; margin: 0 auto; padding: 24px 20px 48px; }
h1 { font-size: 1.7rem; line-height: 1.25; margin: 0 0 8px; }
h2 { font-size: 1.2rem; margin: 36px 0 10px; }
h3 { font-size: 1rem; margin: 0 0 8px; }
p { margin: 4px 0; max-width: 90ch; }
.notes { background: var(--note); color: var(--note-ink); border-radius: 6px; margin: 14px 0 0; }
.notes { padding: 10px 14px 10px 32px; }
.table { overflow-x: auto; }
table { border-collapse: collapse; font-size: 0.9rem; font-variant-numeric: tabular-nums; }
th, td { padding: 5px 12px; border-bottom: 1px solid var(--line); text-align: right; white-space: nowrap; }
th { color: var(--soft); font-weight: 600; white-space: normal; vertical-align: bottom; }
th:first-child, td:first-child { text-align: left; padding-left: 0; }
details th, details td { text-align: left; }
details summary { cursor: pointer; margin: 12px 0; }
.figures { columns: 3 360px; column-gap: 18px; }
figure { margin: 0 0 18px; break-inside: avoid; padding: 14px 16px; background: var(--card); }
figure { border: 1px solid var(--line); border-radius: 8px; }
figure img { display: block; width: 100%; max-width: 460px; margin: 0 auto; background: #ffffff; border-radius: 4px; }
figcaption, .missing p { color: var(--soft); font-size: 0.84rem; margin-top: 10px; overflow-wrap: anywhere; }
.files { display: block; margin-top: 4px; font-family: ui-monospace, monospace; font-size: 0.78rem; }
footer { margin-top: 40px; color: var(--soft); font-size: 0.8rem; }"""

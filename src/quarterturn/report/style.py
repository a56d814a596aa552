"""The page's style sheet; colours are the variables that plots.LIGHT and plots.DARK define."""

STYLE = """
* { box-sizing: border-box; }
body {
  margin: 0 auto; max-width: 56rem; padding: 4.5rem 1.5rem 6rem;
  background: var(--paper); color: var(--ink);
  font: 1rem/1.6 Inter, "Helvetica Neue", Arial, "DejaVu Sans", sans-serif;
  font-variant-numeric: tabular-nums; -webkit-text-size-adjust: 100%;
}
h1 {
  margin: 0 0 1rem;
  font-size: clamp(1.9rem, 5vw, 2.6rem); line-height: 1.12; letter-spacing: -0.022em; font-weight: 650;
}
h2 { margin: 0 0 1.1rem; font-size: 1.25rem; letter-spacing: -0.01em; font-weight: 620; }
h3 { margin: 1.8rem 0 0.5rem; font-size: 0.95rem; font-weight: 620; }
p { margin: 0 0 1rem; max-width: 44rem; }
.kicker { margin: 0 0 0.6rem; color: var(--muted); font-size: 0.85rem; }
.lead { font-size: 1.12rem; line-height: 1.55; }
.meta, .note, figcaption { color: var(--muted); font-size: 0.86rem; line-height: 1.5; }
section { margin-top: 3.2rem; padding-top: 2rem; border-top: 1px solid var(--line); }
ul { margin: 0 0 1rem; padding-left: 1.1rem; max-width: 44rem; }
li { margin: 0.35rem 0; }
li::marker { color: var(--muted); }
figure { margin: 0 0 2rem; }
figure svg { display: block; width: 100%; height: auto; overflow: visible; }
figcaption { margin-top: 0.7rem; max-width: 44rem; }
.wide { overflow-x: auto; margin: 0 0 1.6rem; }
table { border-collapse: collapse; width: 100%; font-size: 0.92rem; }
th, td { padding: 0.42rem 0.75rem; text-align: right; white-space: nowrap; border-bottom: 1px solid var(--line); }
th { font-weight: 500; }
thead th { color: var(--muted); font-size: 0.82rem; vertical-align: bottom; white-space: normal; }
th:first-child, td:first-child { text-align: left; padding-left: 0; }
.variants th:nth-child(2), .variants td:nth-child(2) { text-align: left; }
th:last-child, td:last-child { padding-right: 0; }
td small, th small { color: var(--muted); font-size: 0.92em; }
tr.original { color: var(--muted); }
tr.best th, tr.best td { font-weight: 650; }
tr.best small { font-weight: 400; }
code { font-family: ui-monospace, "SF Mono", Menlo, Consolas, "DejaVu Sans Mono", monospace; font-size: 0.9em; }
.prompt { padding: 0.7rem 1rem; border-left: 3px solid var(--c1); }
dl { margin: 0; display: grid; grid-template-columns: minmax(9rem, 13rem) 1fr; gap: 0.55rem 1.25rem; }
dt { color: var(--muted); font-size: 0.9rem; }
dd { margin: 0; white-space: pre-wrap; overflow-wrap: anywhere; }
.ran { font-size: 0.9rem; max-width: none; }
.facts { font-size: 0.9rem; gap: 0.25rem 1.25rem; }
.note { margin-top: 1rem; }
@media (max-width: 40rem) {
  body { padding-top: 2.5rem; }
  dl { grid-template-columns: 1fr; gap: 0.15rem; }
  dd { margin-bottom: 0.8rem; }
  figure svg { min-width: 34rem; }
  figure { overflow-x: auto; }
}
"""

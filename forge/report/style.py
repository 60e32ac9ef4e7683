"""How the page looks: one sheet, light or dark as the reader's system is."""

from __future__ import annotations

from forge.report.svg import STYLE as CHARTS

PAGE = """
:root{color-scheme:light dark;--page:#f4f5f7;--card:#fff;--ink:#1f2933;--soft:#616e7c;--line:#e1e5ea;--accent:#0072b2;
--good:#0b7a55;--good-bg:#dcf5ea;--bad:#b42318;--bad-bg:#fde8e6;--wait:#8a5b00;--wait-bg:#fdf1d3;--code:#f1f3f5}
@media (prefers-color-scheme:dark){:root{--page:#0e1013;--card:#171a1f;--ink:#e4e7eb;--soft:#9aa5b1;--line:#2a2f37;
--accent:#4aa8e0;--good:#5fd6a5;--good-bg:#0f3325;--bad:#ff9a8f;--bad-bg:#421a17;--wait:#f2c14e;--wait-bg:#3a2e0e;
--code:#0f1216}}
*{box-sizing:border-box}
body{margin:0;background:var(--page);color:var(--ink);
font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",sans-serif}
main{max-width:1240px;margin:0 auto;padding:28px 20px 40px}
h1{font-size:26px;line-height:1.25;margin:0 0 4px;overflow-wrap:anywhere}
h2{font-size:18px;margin:32px 0 12px}
h3{font-size:15px;margin:18px 0 8px;overflow-wrap:anywhere}
p{margin:6px 0}
.soft{color:var(--soft)}
.badge{display:inline-block;padding:2px 11px;border-radius:99px;font-size:13px;font-weight:600;vertical-align:4px;
margin-left:8px;background:var(--wait-bg);color:var(--wait)}
.badge.finished{background:var(--good-bg);color:var(--good)}
.badge.failed,.badge.killed{background:var(--bad-bg);color:var(--bad)}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(128px,1fr));gap:12px;margin-top:18px}
.tile,.card,details{background:var(--card);border:1px solid var(--line);border-radius:10px}
.tile{padding:11px 14px}
.tile b{display:block;font-size:18px;font-weight:600;line-height:1.3;overflow-wrap:anywhere}
.tile span{color:var(--soft);font-size:13px}
.card{padding:14px 18px;overflow-x:auto;width:fit-content;max-width:100%}
.two .card,.charts .card{width:auto}
.charts{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,460px),1fr));gap:14px}
.charts .card{padding:6px 4px 2px}
.charts svg{display:block;width:100%}
.pictures{display:flex;flex-wrap:wrap;gap:14px}
.pictures figure{margin:0}
.pictures img{display:block;margin-top:8px;max-width:min(100%,560px)}
.pictures img.small{width:160px;image-rendering:pixelated}
p.t{white-space:pre-wrap;overflow-wrap:anywhere}
table{border-collapse:collapse;font-size:14px}
th,td{text-align:left;padding:5px 22px 5px 0;border-bottom:1px solid var(--line);vertical-align:top}
tr:last-child td{border-bottom:0}
th{color:var(--soft);font-weight:500;white-space:nowrap}
td{overflow-wrap:anywhere}
td.n,th.n{text-align:right;font-variant-numeric:tabular-nums;white-space:nowrap}
td.k{color:var(--soft);white-space:nowrap}
details{padding:0 18px;margin-top:12px}
summary{cursor:pointer;padding:11px 0;font-weight:600}
details[open]{padding-bottom:16px}
details details{margin-bottom:8px}
pre,code{font:13px/1.5 ui-monospace,SFMono-Regular,Menlo,Consolas,monospace}
pre{background:var(--code);border-radius:8px;padding:12px 14px;margin:6px 0;overflow-x:auto;white-space:pre-wrap;
overflow-wrap:anywhere}
.two{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,420px),1fr));gap:14px}
footer{margin-top:36px;color:var(--soft);font-size:13px}
@media print{.card,.tile,details{break-inside:avoid}}
""".replace("\n", "")

SHEET = PAGE + CHARTS

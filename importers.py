import ast, re, subprocess
from pathlib import Path
root=Path("."); D=["model/trace","model/gates","model/execution","model/user_state","runtime/step"]
files=[p for p in Path("lightning_pipeshift").rglob("*.py")]
mod=lambda p: ".".join(p.with_suffix("").parts)
inD=lambda p: any(str(p).startswith(f"lightning_pipeshift/{d}/") for d in D)
imports={}
def scan(p):
    for node in ast.walk(ast.parse(p.read_text())):
        if isinstance(node,ast.ImportFrom) and node.module and re.match(r"lightning_pipeshift\.(model\.(trace|gates|execution|user_state)|runtime\.step)",node.module):
            yield node.module, node.lineno, ", ".join(a.name for a in node.names)
out={}
for base in ("lightning_pipeshift","tests","benchmarks","examples","scripts"):
    for p in sorted(Path(base).rglob("*.py")) if Path(base).exists() else []:
        for m,l,n in scan(p):
            out.setdefault(m,[]).append((str(p),l,n))
for m in sorted(out):
    print("###",m)
    for f,l,n in out[m]: print(f"  {f}:{l}: {n}")

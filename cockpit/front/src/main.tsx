import { render } from "preact";
import { Cockpit } from "./cockpit";
import "./style.css";
import "./theme";

render(<Cockpit />, document.getElementById("cockpit")!);
